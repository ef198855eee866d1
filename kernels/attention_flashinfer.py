# pyright: basic, reportMissingImports=false
"""Paged attention by FlashInfer (0.6): decode rows on tensor cores (fa2), prefill rows by fa3 on Hopper.

`plan` runs outside CUDA graphs and `run` inside. In graph mode (decode only) one instance serves one captured batch
size; instances share a workspace, since steps of one device run one after the other. The KV view goes in as it is:
FlashInfer takes the strides of its K and V halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from numpy.typing import NDArray

from baton.kernels.attention import AttentionShape, GraphSize, StepLayout
from baton.kernels.block_index import BlockIndex, block_index, pad_decodes

HEAD_DIMS = (64, 128, 256)  # what both fa2 and fa3 are compiled for
_TILES = (16, 64, 128)  # packed queries per program of fa2
_MAX_TILE = _TILES[-1]
_LEAST_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation


@dataclass(frozen=True, slots=True)
class FlashInferWorkspace:
    """Scratch memory of every FlashInferAttention of one device."""

    floats: torch.Tensor  # uint8, partial results of split rows; zeroed, as decode wants it on first use
    indices: torch.Tensor  # int32 [max_blocks], the block tables of a captured step

    @staticmethod
    def allocate(shape: AttentionShape, graph: GraphSize, device: torch.device) -> FlashInferWorkspace:
        """Allocate for steps up to the largest captured size, `graph`."""
        # Split rows leave a float32 tile of packed queries (query, head of the group) for each head and tile. A small
        # batch is split until two programs run on each multiprocessor; a captured one always, with a tile per row.
        group = shape.num_heads // shape.num_kv_heads
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        split_rows = 2 * num_sms // shape.num_kv_heads * _MAX_TILE
        tile = next(size for size in _TILES if group <= size)
        graph_rows = (graph.num_rows * group // tile + graph.num_rows) * tile
        num_bytes = 4 * shape.num_heads * max(split_rows, graph_rows) * (shape.head_dim + 1) + (1 << 20)
        return FlashInferWorkspace(
            floats=torch.zeros(max(_LEAST_WORKSPACE_BYTES, num_bytes), dtype=torch.uint8, device=device),
            indices=torch.zeros(graph.max_blocks, dtype=torch.int32, device=device),
        )


class FlashInferAttention:
    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        workspace: FlashInferWorkspace,
        graph: GraphSize | None = None,
    ) -> None:
        if shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"FlashInfer serves head_dim in {HEAD_DIMS}, not {shape.head_dim}; use TritonAttention")
        self._shape = shape
        self._dtype = dtype
        self._workspace = workspace
        self._graph_rows = None if graph is None else graph.num_rows
        self._decode = _decode_wrapper(workspace, graph)
        # A captured step has no prefill rows, and a wrapper takes 16 MiB.
        self._prefill = None if graph else BatchPrefillWithPagedKVCacheWrapper(workspace.floats, "NHD", backend="auto")
        self._num_decodes = 0
        # A plan is copied to the device from pinned memory that the next plan overwrites.
        self._copied = torch.cuda.Event()

    def plan(self, layout: StepLayout) -> None:
        if self._graph_rows is not None:
            layout = pad_decodes(layout, self._graph_rows)
        self._num_decodes = layout.num_decodes
        self._copied.synchronize()
        if layout.num_decodes:
            self._plan_decodes(block_index(layout, slice(0, layout.num_decodes), self._shape.block_size))
        if self._prefill is not None and layout.num_decodes < len(layout.query_lens):
            index = block_index(layout, slice(layout.num_decodes, None), self._shape.block_size)
            self._plan_prefills(self._prefill, index)
        self._copied.record()

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(query) if out is None else out
        planes = (kv[:, 0], kv[:, 1])
        num_decodes = self._num_decodes
        if num_decodes:
            self._decode.run(query[:num_decodes], planes, out=out[:num_decodes])
        if self._prefill is not None and num_decodes < query.shape[0]:
            self._prefill.run(query[num_decodes:], planes, out=out[num_decodes:])
        return out

    def _plan_decodes(self, index: BlockIndex) -> None:
        self._decode.plan(
            indptr=_pinned(index.indptr),
            indices=self._uploaded(index.indices),
            last_page_len=_pinned(self._last_block_lens(index)),
            num_qo_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            head_dim=self._shape.head_dim,
            page_size=self._shape.block_size,
            window_left=self._window_left,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._shape.scale,
        )

    def _plan_prefills(self, wrapper: BatchPrefillWithPagedKVCacheWrapper, index: BlockIndex) -> None:
        wrapper.plan(
            qo_indptr=_pinned(index.cu_queries),
            paged_kv_indptr=_pinned(index.indptr),
            paged_kv_indices=self._uploaded(index.indices),
            paged_kv_last_page_len=_pinned(self._last_block_lens(index)),
            num_qo_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            head_dim_qk=self._shape.head_dim,
            page_size=self._shape.block_size,
            causal=True,
            window_left=self._window_left,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._shape.scale,
        )

    @property
    def _window_left(self) -> int:
        """How many positions before its own a query sees; -1 = all."""
        return -1 if self._shape.sliding_window is None else self._shape.sliding_window - 1

    def _last_block_lens(self, index: BlockIndex) -> NDArray[np.int32]:
        return (index.kv_lens - 1) % self._shape.block_size + 1

    def _uploaded(self, indices: NDArray[np.int32]) -> torch.Tensor:
        """The block numbers on the device, in the captured buffer if there is one.

        FlashInfer itself would copy them from the host with a wait for the whole stream.
        """
        host = _pinned(indices)
        if self._graph_rows is None:
            return host.to(self._workspace.indices.device, non_blocking=True)
        target = self._workspace.indices[: len(host)]
        target.copy_(host, non_blocking=True)
        return target


def _decode_wrapper(workspace: FlashInferWorkspace, graph: GraphSize | None) -> BatchDecodeWithPagedKVCacheWrapper:
    if graph is None:
        return BatchDecodeWithPagedKVCacheWrapper(workspace.floats, "NHD", use_tensor_cores=True)
    device = workspace.indices.device
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace.floats,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.zeros(graph.num_rows + 1, dtype=torch.int32, device=device),
        paged_kv_indices_buffer=workspace.indices[: graph.max_blocks],
        paged_kv_last_page_len_buffer=torch.zeros(graph.num_rows, dtype=torch.int32, device=device),
    )


def _pinned(values: NDArray[np.int32]) -> torch.Tensor:
    """Pinned host memory of its own: torch keeps it until an asynchronous copy from it is done."""
    return torch.from_numpy(values).pin_memory()
