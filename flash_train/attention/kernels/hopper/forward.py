"""The forward kernel for Hopper: a producer warp loads, consumers of four warps compute 64 queries each.

A persistent grid: a program takes the next task when it has begun to load the last keys of one, so that all end
together, whatever a task costs. The producer hands its number to the consumers with the queries. A consumer keeps one
product of either kind in flight: while it exponentiates the logits of a block, the matrix unit adds the block before
to the output. It weighs a block by the maximum of those before: if weights become too large, which is rare, it computes
the block once more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.attention.kernels.device.mask import count_edges, key_visits, visible
from flash_train.attention.kernels.device.philox import load_key
from flash_train.attention.kernels.device.score import load_slope, logits
from flash_train.attention.kernels.device.softmax import add_sink, finish_rows
from flash_train.attention.kernels.hopper.dropout import draw, find_places, keep
from flash_train.attention.kernels.hopper.online_softmax import (
    exceed,
    make_notes,
    new_maximum,
    read_notes,
    rescale,
    rescale_sums,
    sum_by_thread,
)
from flash_train.attention.kernels.hopper.packed16 import pack, unpack
from flash_train.attention.kernels.hopper.pipeline import (
    fill,
    hold,
    make_mark,
    make_ring,
    make_turns,
    make_words,
    once,
    pass_turn,
    read_word,
    release,
    release_too,
    stage_of,
    sync_warps,
    take_turn,
    tile_of,
    uniform,
    wait_empty,
    wait_full,
    write_word,
)
from flash_train.attention.kernels.hopper.scheduler import (
    Work,
    at,
    count_tasks,
    find_task,
    lanes,
    leave_counter,
    next_task,
    start_of_block,
)


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once"])
def hopper_forward(
    q, k, v, out, lse, counter, cu_q, cu_k, mask, score, sinks, dropout, n_entries, seqlen_q, seqlen_k, n_heads,
    heads_at_once,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PINGPONG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q, k, v and out are descriptors (``descriptors.describe``) of tiles [64, HEAD_DIM] and [BLOCK_N, HEAD_DIM];
    lse is natural and fp32; counter is an int32 of 0, and so again at the end. Grid: as many programs as there are
    processors, or tasks where those are fewer."""
    work = Work(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_heads, heads_at_once)
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS] + q.block_shape, q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [K_STAGES] + k.block_shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [V_STAGES] + v.block_shape, v.layout)
    q_ring = make_ring(q_tiles, Q_STAGES, CONSUMERS)
    k_ring = make_ring(k_tiles, K_STAGES, CONSUMERS)
    v_ring = make_ring(v_tiles, V_STAGES, CONSUMERS)
    words = make_words(Q_STAGES)  # the task of the queries in each stage
    turns = make_turns()
    marks = (make_mark(), make_mark())
    notes = make_notes(CONSUMERS)
    fence_async_shared()
    # Each partition has the same arguments, but for its own: Gluon takes no starred ones.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    out, lse, q_ring, k_ring, v_ring, words, turns, marks, notes, work, mask, score, sinks, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 0,
                )),
                (_consume, (
                    out, lse, q_ring, k_ring, v_ring, words, turns, marks, notes, work, mask, score, sinks, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 1,
                )),
                (_produce, (
                    q, k, v, q_ring, k_ring, v_ring, words, counter, work, mask, GROUP, BLOCK_N, CONSUMERS,
                )),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out, lse, q_ring, k_ring, v_ring, words, turns, marks, notes, work, mask, score, sinks, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 0,
                )),
                (_consume, (
                    out, lse, q_ring, k_ring, v_ring, words, turns, marks, notes, work, mask, score, sinks, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 1,
                )),
                (_consume, (
                    out, lse, q_ring, k_ring, v_ring, words, turns, marks, notes, work, mask, score, sinks, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 2,
                )),
                (_produce, (
                    q, k, v, q_ring, k_ring, v_ring, words, counter, work, mask, GROUP, BLOCK_N, CONSUMERS,
                )),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


@gluon.jit
def _produce(
    q, k, v, q_ring, k_ring, v_ring, words, counter, work, mask,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Fill the rings: queries of a task, then its keys and values block by block."""
    PACKED: gl.constexpr = work.cu_q is not None
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    tasks = count_tasks(work, BLOCK_M)
    done = 0  # tasks
    step = 0  # blocks of keys of all of them
    task = gl.program_id(0)
    while task < tasks:
        seq, head, start_m, live = find_task(task, work, BLOCK_M, True, mask.right is not None)
        if live:
            wait_empty(q_ring, done)
            stage = stage_of(q_ring, done)
            write_word(words, stage, task)
            q_full = q_ring.full.index(stage)
            mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
            for w in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    q, at(seq, head, start_m + 64 * w, seq.q_row, seq.len_q, PACKED), q_full,
                    q_ring.tiles.index(stage * CONSUMERS + w),
                )  # fmt: skip
            done += 1
            visits = key_visits(mask, seq, head, start_m, lanes(), BLOCK_M, BLOCK_N)
            for j in range(0, gl.maximum(visits.stop - visits.first, 1)):
                start_n = start_of_block(visits, mask, seq, j, BLOCK_N)
                where = at(seq, head // GROUP, start_n, seq.k_row, seq.len_k, PACKED)
                fill(k_ring, step, k, where)
                fill(v_ring, step, v, where)
                step += 1
        task = next_task(counter)
    leave_counter(counter, task, tasks)
    wait_empty(q_ring, done)
    write_word(words, stage_of(q_ring, done), task * 0 - 1)
    mbarrier.arrive(q_ring.full.index(stage_of(q_ring, done)), count=1)


@gluon.jit
def _consume(
    out, lse, q_ring, k_ring, v_ring, words, turns, marks, notes, work, mask, score, sinks, dropout,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The W-th 64 queries of every task."""
    PACKED: gl.constexpr = work.cu_q is not None
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # of logits [64, BLOCK_N]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # of the output [64, HEAD_DIM]
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q_ring.tiles.dtype
    key0, key1 = load_key(dropout)
    if dropout.state is not None:
        key0, key1 = uniform(key0), uniform(key1)
    places = find_places(dropout, BLOCK_N)
    done = 0
    step = gl.to_tensor(0)
    wait_full(q_ring, done)
    task = read_word(words, stage_of(q_ring, done))
    while task >= 0:
        seq, head, start_m, live = find_task(task, work, BLOCK_M, True, mask.right is not None)
        head64 = head.to(gl.int64)
        visits = key_visits(mask, seq, head64, start_m, lanes(), BLOCK_M, BLOCK_N)
        slope = load_slope(score, seq, head64)
        first_m = start_m + 64 * W
        offs_m = first_m + gl.arange(0, 64, S_ROWS)
        tile = q_ring.tiles.index(stage_of(q_ring, done) * CONSUMERS + W)
        q_tile = tile.reshape([64, HEAD_DIM])
        m_i = gl.full([64], float("-inf"), gl.float32, S_ROWS)  # what was subtracted from logits, in units of log2
        acc = gl.zeros([64, HEAD_DIM], gl.float32, OUT)

        wait_full(k_ring, step)
        take_turn(turns, step, W, PINGPONG)
        s_next = _start_logits(q_tile, k_ring, step, BLOCK_N, S)
        pass_turn(turns, step, W, CONSUMERS, PINGPONG)
        if Q_STAGES > 1:  # the output of the task before has left the place of its queries by now
            tma.store_wait(0)
            release(q_ring, gl.maximum(done - 1, 0), done > 0)
        even, odd = _draw(dropout, key0, key1, 0, visits, mask, seq, head64, first_m, places, BLOCK_N)
        s = warpgroup_mma_wait(0, deps=[s_next])
        release(k_ring, step)
        s = _masked(s, 0, visits, mask, score, slope, seq, head64, offs_m, BLOCK_N, S)
        alpha, reference, m_i = new_maximum(s, m_i, score)
        p = gl.exp2(s * score.factor - reference[:, None])
        sums = sum_by_thread(p)  # running sums of exponentials
        m_i = gl.where(offs_m < seq.len_q, m_i, 0.0)  # rows past the end shall not be computed once more
        p = pack(p, dtype)
        for j in range(1, visits.stop - visits.first):
            acc, p, even, odd, m_i, sums = _step(
                acc, p, even, odd, m_i, sums, j, words, stage_of(q_ring, done), task, q_tile, k_ring, v_ring, turns,
                marks, notes, step, visits, mask, score, slope, dropout, key0, key1, places, seq, head64, first_m,
                offs_m, BLOCK_N, HEAD_DIM, CONSUMERS, PINGPONG, W,
            )  # fmt: skip
            step += 1
        if dropout.state is not None:
            p = keep(p, even, odd, BLOCK_N, False)
        wait_full(v_ring, step)
        acc_next = _start_output(p, v_ring, acc, step)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        release(v_ring, step)
        step += 1

        l_i = gl.convert_layout(gl.sum(sums, 1), S_ROWS)
        if sinks is not None:
            alpha, m_i, l_i = add_sink(m_i, l_i, gl.load(sinks + head))
            acc = rescale(acc, alpha)
        lse_tile, norm = finish_rows(m_i, l_i)
        if PACKED:
            lse_tile = gl.where(seq.index < work.n_entries, lse_tile, float("-inf"))  # the tail has no sink either
        if dropout.state is not None:
            norm = norm * (dropout.threshold * (1.0 / 256.0))
        acc = rescale(acc, 1.0 / norm)
        q_tile.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, at(seq, head, first_m, seq.q_row, seq.len_q, PACKED), tile)
        lse_ptrs = lse.ptr + seq.batch * lse.stride_batch + head64 * lse.stride_head + seq.q_row + offs_m
        gl.store(lse_ptrs, lse_tile, mask=offs_m < seq.len_q)
        if Q_STAGES == 1:
            tma.store_wait(0)
            release(q_ring, done)
        done += 1
        wait_full(q_ring, done)
        task = read_word(words, stage_of(q_ring, done))
    tma.store_wait(0)


@gluon.jit
def _step(
    acc, p, even, odd, m_i, sums, j, words, slot, task, q_tile, k_ring, v_ring, turns, marks, notes, step, visits, mask,
    score, slope, dropout, key0, key1, places, seq, head, first_m, offs_m,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Begin the logits of block j, add the weights p of the block before to the output, and weigh block j meanwhile."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dtype: gl.constexpr = v_ring.tiles.dtype
    wait_full(k_ring, step + 1)
    take_turn(turns, step + 1, W, PINGPONG)
    s_next = _start_logits(q_tile, k_ring, step + 1, BLOCK_N, S)
    wait_full(v_ring, step)
    if dropout.state is not None:
        p = keep(p, even, odd, BLOCK_N, False)
    acc_next = _start_output(p, v_ring, acc, step)
    sync_warps()  # all have read the notes of the step before: here, where they wait for the products
    if dropout.state is not None:
        # What is drawn depends on a word that is read only now: else the assembler draws between the products, and
        # holds up the other consumer's.
        hold(marks[0])
        head = head + (read_word(words, slot) - task)
    s = warpgroup_mma_wait(1, deps=[s_next])
    TERMS: gl.constexpr = len(mask.terms) > 0
    pass_turn(turns, step + 1, W, CONSUMERS, PINGPONG and TERMS)  # to ask them takes long
    s = _masked(s, j, visits, mask, score, slope, seq, head, offs_m, BLOCK_N, S)
    pass_turn(turns, step + 1, W, CONSUMERS, PINGPONG and not TERMS)  # only now, so that logits come one at a time

    # The wait for the output stands between two halves of the exponentials: what else is to be done for the first, the
    # assembler does while the second runs.
    first, second = _halves(s * score.factor - m_i[:, None])
    first = gl.exp2(first)
    even, odd = _draw(dropout, key0, key1, j, visits, mask, seq, head, first_m, places, BLOCK_N)
    more = sum_by_thread(first)
    too_large = exceed(more)
    hold(marks[1])
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    second = gl.exp2(second)
    more_second = sum_by_thread(second)
    notes.index(W).store((too_large | exceed(more_second)).to(gl.int8))
    more += more_second
    p = pack(_whole(first, second, S), dtype)
    release(v_ring, step)
    if read_notes(notes.index(W)):  # once more, from the logits on, and their maximum first
        s_next = _start_logits(q_tile, k_ring, once(step + 1), BLOCK_N, S)
        s = warpgroup_mma_wait(0, deps=[s_next])
        s = _masked(s, once(j), visits, mask, score, slope, seq, head, offs_m, BLOCK_N, S)
        alpha, reference, m_i = new_maximum(s, m_i, score)
        p = gl.exp2(s * score.factor - reference[:, None])
        more = sum_by_thread(p)
        p = pack(p, dtype)
        sums = rescale_sums(sums, alpha)
        acc = rescale(acc, alpha)
        sync_warps()
    release_too(k_ring, step + 1)
    sums += more
    return acc, p, even, odd, m_i, sums


@gluon.jit
def _start_logits(q_tile, k_ring, step, BLOCK_N: gl.constexpr, S: gl.constexpr):
    k_tile = tile_of(k_ring, step)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_output(p, v_ring, acc, step):
    v_tile = tile_of(v_ring, step)
    weights = unpack(p, v_tile.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(weights, v_tile, acc, is_async=True)


@gluon.jit
def _masked(s, j, visits, mask, score, slope, seq, head, offs_m, BLOCK_N: gl.constexpr, S: gl.constexpr):
    """The logits of block j, of products s: -inf where nothing is seen."""
    start_n = start_of_block(visits, mask, seq, j, BLOCK_N)
    offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))[None, :]
    distance = gl.abs(offs_m[:, None] + (seq.len_k - seq.len_q) - offs_n)
    s = logits(s, score, slope, distance, False)
    nothing = visits.stop <= visits.first
    if (j < count_edges(visits)) | nothing:
        rows = once(offs_m)[:, None]
        if len(mask.terms) > 0 and nothing:  # there is no position that a term could be asked about
            s = gl.full([64, BLOCK_N], float("-inf"), gl.float32, S)
        else:  # where there is nothing, the block begins past the last key
            s = gl.where(visible(mask, seq, head, rows, offs_n), s, float("-inf"))
    return s


@gluon.jit
def _draw(dropout, key0, key1, j, visits, mask, seq, head, first_m, places, BLOCK_N: gl.constexpr):
    """Which weights of block j are kept: for ``keep``."""
    even, odd = gl.to_tensor(0), gl.to_tensor(0)
    if dropout.state is not None:
        start_n = start_of_block(visits, mask, seq, j, BLOCK_N)
        even, odd = draw(dropout, key0, key1, seq.index, head, first_m, start_n, places, BLOCK_N, False)
    return even, odd


@gluon.jit
def _halves(x):
    """Its columns' first half, and their second."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _whole(a, b, LAYOUT: gl.constexpr):
    x = gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
