"""Per-record gradients of embeddings: the rows of δ added up for each token that the record holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .per_record import PerRecord, row_squares, rule_for, wide


class _Rows(PerRecord):
    """A record touches few rows of the table: keep one summed row for each (record, token) that occurs."""

    def __init__(self, tokens: Tensor, delta: Tensor, table: tuple[int, int], padding: int | None) -> None:
        self.records, self.table = tokens.shape[0], table
        if padding is not None:
            delta = delta * (tokens != padding).unsqueeze(-1)
        owner = torch.arange(self.records, device=tokens.device).repeat_interleave(tokens.shape[1])
        keys, slot = torch.unique(owner * table[0] + tokens.flatten(), return_inverse=True)
        self.owner, self.token = keys // table[0], keys % table[0]
        self.rows = delta.new_zeros(len(keys), table[1]).index_add_(0, slot, delta.flatten(0, 1))
        squares = row_squares(self.rows)
        self.squared_norms = squares.new_zeros(self.records).index_add_(0, self.owner, squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.rows.new_zeros(self.table)
        self.accumulate(weights, total)
        return total

    def accumulate(self, weights: Tensor, total: Tensor) -> None:
        scaled = self.rows * weights.to(self.rows)[self.owner].unsqueeze(1)
        total.index_add_(0, self.token, scaled.to(total.dtype))

    def dense(self) -> Tensor:
        full = self.rows.new_zeros(self.records, *self.table)
        full[self.owner, self.token] = self.rows
        return full

    def drop(self, records: Tensor) -> None:
        self.rows[records[self.owner]] = 0


@rule_for(nn.Embedding)
def embedding(layer: nn.Embedding, tokens: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    delta = wide(delta).reshape(tokens.shape[0], -1, layer.embedding_dim)
    table = (layer.num_embeddings, layer.embedding_dim)
    return {"weight": _Rows(tokens.reshape(tokens.shape[0], -1), delta, table, layer.padding_idx)}
