#!/usr/bin/env bash
# The commands behind the figures in docs/results: scripts/measure.sh OUT PART…
#
# Everything is written to the folder OUT. A part that was stopped continues when it is started again with the
# same OUT.
# The last part, `collect`, turns the folder into docs/results/*.json; update_readme.py makes tables and pictures.
# Environment: outside a git checkout, COMMIT is recorded. On one H200 a part takes about 10 minutes, `attention` 20.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:?OUT PART…; parts: ablation ablation_long ablation_dropout ablation_dropout_long find_max find_max_offload find_max_80gb memory attention training training_peer start graphs kernels long_rows fp8 updates parallel collect}
shift
mkdir -p "$out"
commit=(${COMMIT:+--commit "$COMMIT"})
model=(model=1b3 precision=bf16-true)
short='sweep.seq_len=[1024,2048,4096,8192,16384]'
long='sweep.seq_len=[32768,65536]'
fast='sweep.attention=[standard,sdpa,flash]'
all='sweep.attention=[standard,chunked,sdpa,flash]'

ablate() { # NAME OVERRIDE…: one document a row, so that every backend sees whole rows. Short rows run as a user's run
  # does, with a CUDA graph where there can be one. Long ones do not need it, and their steps are split into parts.
  python scripts/ablate.py run_dir="$out/ablation/$1" "${model[@]}" data.packing=concat logger=none "${@:2}"
}

find_max() { # NAME OVERRIDE…: short documents, because attention over 500,000 tokens takes minutes a step
  [ -e "$out/documents.jsonl" ] || python - "$out/documents.jsonl" <<'EOF'
import json, pathlib, sys, sysconfig

sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("**/[a-z]*.py"))
text = "".join(path.read_text("utf-8", "ignore") for path in sources if "site-packages" not in path.parts)
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.writelines(json.dumps({"text": text[start : start + 4096]}) + "\n" for start in range(0, len(text), 4096))
EOF
  python scripts/profile_memory.py find_max=true run_dir="$out/find_max/$1" precision=bf16-true \
    data=text data.path="$out/documents.jsonl" logger=none "${@:2}"
}

train() { # NAME OVERRIDE…
  grep -qs '"status": "finished"' "$out/$1/summary.json" && return
  local resume=()
  compgen -G "$out/$1/checkpoints/step-*.ckpt" >/dev/null && resume=(resume=last)
  python scripts/train.py run_dir="$out/$1" data=stdlib logger=none "${@:2}" "${resume[@]}"
}

for part; do
  case $part in
    ablation) ablate short "$short" "$all" 'sweep.dropout=[0.0]' callbacks.step_times=false ;;
    ablation_long) # chunked attention over long rows takes minutes a step: fewer steps
      ablate long "$long" "$fast" 'sweep.dropout=[0.0]'
      ablate long_chunked_32k 'sweep.seq_len=[32768]' 'sweep.attention=[chunked]' 'sweep.dropout=[0.0]' max_steps=3
      ablate long_chunked_64k 'sweep.seq_len=[65536]' 'sweep.attention=[chunked]' 'sweep.dropout=[0.0]' max_steps=2
      ;;
    ablation_dropout) ablate dropout "$short" "$all" 'sweep.dropout=[0.1]' callbacks.step_times=false ;;
    ablation_dropout_long) ablate dropout_long "$long" "$fast" 'sweep.dropout=[0.1]' ;;
    find_max)
      find_max flash model=1b3 'find_max.attention=[flash]'
      # selective recomputes all of standard attention, as checkpoint does
      find_max standard model=1b3 'find_max.attention=[standard]' 'find_max.memory=[none,checkpoint]'
      ;;
    find_max_offload) # the limits keep each search to one long trial
      for size in 1b3:1703936 8b:589824; do
        find_max offload-${size%:*} model=${size%:*} 'find_max.attention=[flash]' 'find_max.memory=[offload]' \
          find_max.limit=${size#*:}
      done
      ;;
    find_max_80gb) # the same on a card of 80 GB, with the optimizer's state in the host's memory
      find_max offload-8b-80gb model=8b 'find_max.attention=[flash]' 'find_max.memory=[offload]' optimizer.offload=true \
        find_max.limit=393216
      ;;
    memory) python scripts/bench_memory.py --out "$out/memory.json" "${commit[@]}" ;;
    attention) python scripts/bench_attention.py --out "$out/attention_h200.json" "${commit[@]}" ;;
    training_peer) python scripts/bench_training.py --out "$out/training_peer.json" "${commit[@]}" ;;
    start) python scripts/bench_start.py --out "$out/start.json" "${commit[@]}" ;;
    training)
      once() { train "training/$1-$2" "${model[@]}" max_steps=100 attention="$1" seq_len="$2"; }
      for attention in flash sdpa; do once $attention 16384; done
      for attention in flash sdpa standard; do once $attention 4096; done
      ;;
    graphs) # short rows, with and without CUDA graphs
      both() {
        for graph in true false; do
          train "graphs/$1-$graph" trainer.cuda_graph=$graph max_steps=30 trainer.checkpoints=false data.val_batches=1 \
            callbacks.sample.tokens=0 "${@:2}"
        done
      }
      both 125m model=125m
      both 4096 "${model[@]}" seq_len=4096
      both 4096x8 "${model[@]}" seq_len=4096 accumulate=8
      both 1024 "${model[@]}" seq_len=1024 batch_size=4
      both 1024x8 "${model[@]}" seq_len=1024 batch_size=4 accumulate=8
      ;;
    kernels) # where the time of a step goes
      profile() {
        train "kernels/$1" max_steps=20 callbacks.kernel_times.every=15 trainer.checkpoints=false data.val_batches=1 \
          callbacks.sample.tokens=0 "${@:2}"
      }
      profile 125m model=125m
      profile 4096 "${model[@]}" seq_len=4096
      profile 16384 "${model[@]}" seq_len=16384
      ;;
    long_rows) # one step over a row that is a single document
      step() {
        train "long_rows/$1" model=$1 precision=bf16-true optimizer.offload=true data.packing=concat max_steps=1 data.val_batches=1 \
          trainer.checkpoints=false callbacks.sample.tokens=0 "${@:2}"
      }
      step 8b seq_len=262144 memory=offload
      step 1b3 seq_len=524288 memory=selective memory.offload=auto
      ;;
    fp8) # 8b needs 8-bit moments on one card of 80 GB
      once() { train "fp8/$1" model=8b seq_len=8192 memory=selective memory.keep=auto optimizer.moments=8bit max_steps=200 trainer.checkpoints=false callbacks.sample.tokens=0 "${@:2}"; }
      once bf16 precision=bf16-true
      once bf16-sdpa precision=bf16-true attention=sdpa # how far the losses of two runs in bf16 differ
      for recipe in tensorwise rowwise; do once $recipe precision=fp8 precision_fp8.recipe=$recipe; done
      ;;
    updates) # fine-tuning at a small learning rate, with each way to keep bf16 weights, and with fp32 weights
      tune() { train "updates/$1" model=pretrained init_from="$out/start" max_steps=150 optimizer.lr=2e-5 "${@:2}"; }
      train updates/start model=125m precision=bf16-mixed max_steps=150
      [ -e "$out/start" ] || python scripts/export.py "$out/updates/start" "$out/start"
      tune mixed precision=bf16-mixed
      for master in exact stochastic none; do tune $master precision=bf16-true optimizer.master=$master; done
      ;;
    parallel) # on all GPUs of the machine, which are a power of two
      gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
      ranks() { # GPUS WHAT…
        torchrun --nproc-per-node "$1" scripts/bench_parallel.py "${@:2}" --out "$out/parallel_x$gpus.json" "${commit[@]}"
      }
      for ((n = gpus; n > 0; n /= 2)); do ranks "$n" weak; done
      ranks "$gpus" long
      ranks "$gpus" training --only context
      ranks "$gpus" scaling
      ;;
    collect)
      for name in ablation find_max training graphs kernels long_rows fp8 updates; do
        [ ! -d "$out/$name" ] ||
          python scripts/collect_runs.py "$out/$name"/* --add --out docs/results/$name.json "${commit[@]}"
      done
      for name in memory attention_h200 training_peer start parallel_x4 parallel_x8; do
        [ ! -f "$out/$name.json" ] || cp "$out/$name.json" docs/results/$name.json
      done
      ;;
    *) echo "$part: no such part" >&2; exit 1 ;;
  esac
done
