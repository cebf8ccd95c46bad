"""Key-value caches with random contents."""

import torch

HEADS, KV_HEADS = 4, 2


class Store:
    """A cache with random contents, contiguous or in shuffled pages, and the index of each position."""

    def __init__(self, batch, capacity, page_size=None, shuffled_rows=False, head_dim=8, head_dim_v=8):
        self.idx = self.table = None
        if page_size is None:
            first, second = batch + 2, capacity
            rows = torch.randperm(first)[:batch] if shuffled_rows else torch.arange(batch)
            self.idx = rows.int() if shuffled_rows else None
            self.where = [[(int(row), p) for p in range(capacity)] for row in rows]
        else:
            columns = -(-capacity // page_size)
            first, second = batch * columns + 1, page_size
            self.table = torch.randperm(first)[: batch * columns].view(batch, columns).int()
            pages = self.table.tolist()
            self.where = [[(pages[b][p // page_size], p % page_size) for p in range(capacity)] for b in range(batch)]
        self.k = torch.randn(first, second, KV_HEADS, head_dim, dtype=torch.float64)
        self.v = torch.randn(first, second, KV_HEADS, head_dim_v, dtype=torch.float64)

    def row(self, cache, b, begin, end):
        """Positions begin to end of row b, read one by one."""
        found = [cache[self.where[b][p]] for p in range(begin, end)]
        return torch.stack(found) if found else cache.new_zeros(0, *cache.shape[2:])

    @property
    def address(self):
        return {"cache_batch_idx": self.idx, "block_table": self.table}
