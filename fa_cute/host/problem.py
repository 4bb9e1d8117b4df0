"""The facts of one call, and every error that a user can make, before anything is compiled.

``Problem.of`` checks the arguments of ``fa_cute.attention`` and reduces them to shapes, dtypes and
numbers; nothing here reads the data of a tensor. Errors are TypeError for a wrong kind of object
and ValueError for a wrong value; each names the tensor, what it is, and what is accepted.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_cute.host import configs
from fa_cute.spans import Bounds

if TYPE_CHECKING:
    from fa_cute.host.planning import Mods
    from fa_cute.mods.trace import Traced

CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CUDA_DTYPES = (torch.float16, torch.bfloat16)
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Positions, and sums of two lengths and of a length and a bound, stay in int32 in the kernels.
MAX_LENGTH = 2**30
MAX_ROWS = 2**31 - 1
LARGEST_FLOAT32 = 3.4028234663852886e38

# The classes of lengths, the only thing about lengths that chooses a kernel. In calls of at most so
# many queries, query heads that share keys share tiles, if nothing else needs the rows apart. 64 is
# half of the smallest tile.
FEW_QUERIES = 64
# Calls of at most so many keys take rows whose blocks divide them, where the table has such rows.
FEW_KEYS = 1024
# TMA reads 16 bytes at a time: addresses and strides (in bytes) are multiples of this.
ALIGNMENT = 16
WIDE_INTEGERS = (torch.int64, torch.uint32)


@dataclass(frozen=True)
class Problem:
    """The checked facts of a call.

    q is ``(batch, seqlen_q, heads_q, head_dim)``, k and v ``(batch, seqlen_k, heads_k, ·)``.
    ``window`` holds what is left to bound after ``causal``: (left, right), None where unlimited,
    in keys, no larger than the lengths. ``scale`` multiplies q·k.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    window: tuple[int | None, int | None]
    scale: float
    return_lse: bool
    deterministic: bool
    sinks: bool = False

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mods: Mods,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        target: str | None = None,
    ) -> Problem:
        """Check the arguments of a call (see ``fa_cute.attention``) and keep their facts.

        With a ``target`` the limits of its kernels apply, whatever device the tensors are on.
        """
        kernels = target is not None or getattr(q, "is_cuda", False)
        _check_tensors(q, k, v, CUDA_DTYPES if kernels else CPU_DTYPES)
        _check_shapes(q, k, v)
        batch, seqlen_q, heads_q, head_dim = q.shape
        causal = _flag("causal", causal)
        problem = cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            heads_q=heads_q,
            heads_k=k.shape[2],
            head_dim=head_dim,
            head_dim_v=v.shape[3],
            dtype=q.dtype,
            device=q.device,
            causal=causal,
            window=_window(window, causal, seqlen_q, k.shape[1]),
            scale=_scale(scale, head_dim),
            return_lse=_flag("return_lse", return_lse),
            deterministic=_flag("deterministic", deterministic),
            sinks=sinks is not None,
        )
        if kernels:
            _check_kernel_limits(problem)
        if sinks is not None:
            _check_sinks(problem, sinks)
        for name, traced in mods.present():
            check_captured(problem, name, traced)
        if out is not None:
            check_out(problem, out)
        return problem

    @property
    def gqa_ratio(self) -> int:
        """Query heads a key/value head."""
        return self.heads_q // self.heads_k

    @property
    def few_queries(self) -> bool:
        """Whether a tile of queries would be at most half full, and query heads may share one."""
        return self.seqlen_q <= FEW_QUERIES

    @property
    def few_keys(self) -> bool:
        """Whether a last block that is not full is a large part of the work.

        Not where queries are few: a decoding loop keeps its kernel while its keys grow.
        """
        return self.seqlen_k <= FEW_KEYS and not self.few_queries

    @property
    def bounds(self) -> Bounds:
        """Causal and the window as ``spans`` reads them: causal is a right bound of 0."""
        left, right = self.window
        return Bounds(self.seqlen_q, self.seqlen_k, left, 0 if self.causal else right)

    @property
    def empty(self) -> bool:
        """Nothing to compute: no row of output, or no key at all."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """``(B, Sq, Hq, Dv)``."""
        return self.batch, self.seqlen_q, self.heads_q, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """``(B, Hq, Sq)``."""
        return self.batch, self.heads_q, self.seqlen_q


def allocate(
    problem: Problem, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised out ``(B, Sq, Hq, Dv)`` unless given; lse ``(B, Hq, Sq)`` fp32 if returned."""
    if out is None:
        out = torch.empty(problem.out_shape, dtype=problem.dtype, device=problem.device)
    if not problem.return_lse:
        return out, None
    return out, torch.empty(problem.lse_shape, dtype=torch.float32, device=problem.device)


def by_tiles(tensor: torch.Tensor) -> bool:
    """Whether TMA can load ``tensor``: rows contiguous; address, other strides on 16 bytes."""
    *outer, last = tensor.stride()
    if last != 1:
        return False
    places, size = tensor.data_ptr(), tensor.element_size()
    for stride in outer:
        places |= stride * size
    return places % ALIGNMENT == 0


def kernel_ready(tensor: torch.Tensor) -> torch.Tensor:
    """A ``(B, S, H, D)`` tensor as a kernel may read it: the same one, a view of it, or a copy.

    The stride of a dimension of size 1 carries no meaning, so a view replaces a wrong one.
    """
    if by_tiles(tensor):  # nearly always; a backward asks of five tensors, and the rest takes 4 us
        return tensor
    if not layout_is_ready(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    unit, (*outer, _) = ALIGNMENT // tensor.element_size(), tensor.stride()
    sizes = zip(tensor.shape, outer, strict=False)
    replaced = (unit if size == 1 else stride for size, stride in sizes)
    return tensor.as_strided(tensor.shape, (*replaced, 1))


def layout_is_ready(tensor: torch.Tensor) -> bool:
    """Whether no copy is needed: last stride 1, address and other strides multiples of 16 bytes.

    A stride of 0 (an expanded dimension) is such a multiple; dimensions of size 1 do not count.
    """
    unit = ALIGNMENT // tensor.element_size()
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    sound = all(size == 1 or stride % unit == 0 for size, stride in outer)
    return last[1] == 1 and sound and tensor.data_ptr() % ALIGNMENT == 0


def check_out(problem: Problem, out: torch.Tensor) -> None:
    """ValueError or TypeError unless ``out`` can take the result of ``problem``."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor or None, not {type(out).__name__}")
    if tuple(out.shape) != problem.out_shape or out.dtype != problem.dtype:
        raise ValueError(
            f"{described('out', out)}; the result is {problem.out_shape} (B, Sq, Hq, Dv) "
            f"{problem.dtype}"
        )
    if out.device != problem.device:
        raise ValueError(f"{described('out', out)} is on {out.device}, but q on {problem.device}")
    if any(s > 1 and stride == 0 for s, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"{described('out', out)} has strides {out.stride()}: several elements share one "
            "address, so it cannot hold a result; pass a tensor that is not expanded"
        )
    if out.requires_grad:
        raise ValueError("out requires grad: a result written in place has no gradient; detach it")


def described(name: str, tensor: torch.Tensor) -> str:
    """The tensor as an error message names it: ``q (2, 128, 8, 64) torch.bfloat16``."""
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"


def _check_tensors(q: Any, k: Any, v: Any, accepted: tuple[torch.dtype, ...]) -> None:
    """q, k and v are dense 4-d tensors of one accepted dtype on one supported device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ValueError(
                f"{name} is inside a torch.func transform, which fa_cute does not support"
            )
        if tensor.is_nested:
            raise ValueError(f"{name} is a nested tensor; a dense one is needed: pad it and mask")
        if tensor.layout != torch.strided:
            raise ValueError(f"{described(name, tensor)} is {tensor.layout}; a dense one is needed")
        if tensor.ndim != 4:
            raise ValueError(
                f"{described(name, tensor)} has {tensor.ndim} dimensions; q is (B, Sq, Hq, D), "
                "k (B, Sk, Hk, D), v (B, Sk, Hk, Dv)"
            )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"q is on {q.device}; fa_cute runs on CUDA tensors (compute capability 9.0) and on CPU "
            "tensors"
        )
    if q.dtype not in accepted:
        raise ValueError(
            f"{described('q', q)} on {q.device}: {', '.join(map(str, accepted))} are accepted; "
            "convert q, k and v with .to()"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(
                f"{described(name, tensor)} differs from q's dtype {q.dtype}; convert one of them"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, but q on {q.device}; move one of them")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The shapes of q, k and v belong together."""
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{described('k', k)} and {described('v', v)}: batch, length and heads must be equal"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{described('q', q)} and {described('k', k)} differ in batch")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{described('q', q)} and {described('k', k)} differ in head dimension")
    heads_q, heads_k = q.shape[2], k.shape[2]
    if heads_q == 0 or heads_k == 0 or heads_q % heads_k:
        raise ValueError(
            f"{described('q', q)} has {heads_q} heads and {described('k', k)} {heads_k}: the query "
            "heads must be a positive multiple of the key/value heads"
        )
    if 0 in (q.shape[3], v.shape[3]):
        raise ValueError(f"{described('q', q)}, {described('v', v)}: a head dimension is 0")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[1] > MAX_LENGTH:
            raise ValueError(
                f"{described(name, tensor)} has {tensor.shape[1]} positions; at most 2^30 work"
            )


def _check_sinks(problem: Problem, sinks: Any) -> None:
    """One logit a query head, where q is."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks must be a torch.Tensor or None, not {type(sinks).__name__}")
    accepted = SINK_DTYPES + ((torch.float64,) if problem.dtype == torch.float64 else ())
    if tuple(sinks.shape) != (problem.heads_q,) or sinks.layout != torch.strided:
        raise ValueError(
            f"{described('sinks', sinks)}: it holds a logit a query head, so its shape is "
            f"({problem.heads_q},)"
        )
    if sinks.dtype not in accepted:
        raise ValueError(
            f"{described('sinks', sinks)}: {', '.join(map(str, accepted))} are accepted beside "
            f"q in {problem.dtype}; convert it with .float()"
        )
    if sinks.device != problem.device:
        raise ValueError(f"sinks is on {sinks.device}, but q on {problem.device}; move it there")


def _check_kernel_limits(problem: Problem) -> None:
    """What the CUDA kernels can take beyond what ``_check_tensors`` saw."""
    dims = (problem.head_dim, problem.head_dim_v)
    if not configs.takes(*dims):
        raise ValueError(
            f"head dims (D, Dv) are {dims}; kernels exist for {configs.HEAD_DIMS}; pad q, k and v "
            f"with zeros up to one and pass scale={problem.head_dim}**-0.5, or call with CPU "
            "tensors, where every head dim works"
        )
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // 64)
    if tiles > MAX_ROWS:
        raise ValueError(
            f"B * Hq * Sq = {rows} rows of output are {tiles} tiles of 64, more than {MAX_ROWS}; "
            "split the batch"
        )


def check_captured(problem: Problem, mod: str, traced: Traced) -> None:
    """Captured tensors are where q is, and large enough for the indices they are read at."""
    for at, tensor in enumerate(traced.captured):
        name = described(f"captured tensor {at} of {mod},", tensor)
        if tensor.device != problem.device:
            raise ValueError(
                f"{name}, is on {tensor.device}, but q on {problem.device}; move it there before "
                "the call" + _scalar_hint(tensor, problem)
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name}, is {tensor.layout}; a dense one can be read: .to_dense()")
        if tensor.numel() == 0 and not problem.empty:
            raise ValueError(f"{name}, has no element to read")
        if max(tensor.shape, default=0) > MAX_ROWS and tensor.device.type == "cuda":
            raise ValueError(
                f"{name}, has a dimension of more than {MAX_ROWS} elements; indices are int32: "
                "capture the part that is read, tensor[..., :2**31 - 1]"
            )
        _check_range(name, tensor)
    check_indexed((problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k), mod, traced)


def check_indexed(sizes: tuple[int, int, int, int], mod: str, traced: Traced) -> None:
    """ValueError if a captured tensor is too small for an index, in a call of (B, Hq, Sq, Sk)."""
    meanings = ("the batch size", "the number of query heads", "the number of queries")
    meanings += ("the number of keys",)
    extents = dict(zip(("b", "h", "q", "kv"), zip(sizes, meanings, strict=True), strict=True))
    nodes = traced.graph.nodes
    for node in nodes:
        if node.op != "load":
            continue
        tensor = traced.captured[node.attr]
        for dim, arg in enumerate(node.args):
            index = nodes[arg].op
            needed, meaning = extents.get(index, (0, ""))
            if tensor.shape[dim] < needed:
                raise ValueError(
                    f"captured tensor {node.attr} of {mod}, {tuple(tensor.shape)} {tensor.dtype}, "
                    f"is indexed by {index} in dimension {dim}, where it has {tensor.shape[dim]} "
                    f"elements; {needed} are needed, {meaning}"
                )


def _check_range(name: str, tensor: torch.Tensor) -> None:
    """Wide integers must fit int32, in which mods compute; on CUDA looking would take a wait."""
    if tensor.device.type != "cpu" or tensor.dtype not in WIDE_INTEGERS or tensor.numel() == 0:
        return
    wide = tensor.detach().to(torch.int64)
    low, high = int(wide.min()), int(wide.max())
    if low < -(2**31) or high >= 2**31:
        raise ValueError(
            f"{name}, holds values from {low} to {high}; mods compute in int32, from -2147483648 "
            "to 2147483647: renumber them, as torch.unique(ids, return_inverse=True)[1] does"
        )


def _scalar_hint(tensor: torch.Tensor, problem: Problem) -> str:
    if tensor.ndim == 0 and problem.device.type == "cpu":
        return " (or capture tensor.cpu(), a scalar that travels by value)"
    return ""


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


def _window(
    window: Any, causal: bool, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """(left, right) with None for unlimited; a right bound beside causal never adds anything.

    A bound past the lengths sees everything; cutting it there keeps sums with it in int32. On the
    left ``seqlen_k`` reaches every key from any row; on the right ``seqlen_q`` does.
    """
    if window is None:
        return None, None
    kinds = (str, torch.Tensor, Mapping, Set)
    if isinstance(window, kinds) or not hasattr(window, "__len__"):
        raise TypeError(f"window must be (left, right) or None, not {window!r}")
    if len(window) != 2:
        raise ValueError(f"window must be two bounds, (left, right), not {tuple(window)!r}")
    left, right = _bound("left", window[0]), _bound("right", window[1])
    left = None if left is None else min(left, seqlen_k)
    right = None if right is None or causal else min(right, seqlen_q)
    return left, right


def _bound(name: str, bound: Any) -> int | None:
    if bound is None:
        return None
    if isinstance(bound, (bool, torch.Tensor)) or not hasattr(bound, "__index__"):
        raise TypeError(
            f"window's {name} bound must be an integer or None, not {type(bound).__name__}"
        )
    number = operator.index(bound)
    if number < -1:
        raise ValueError(
            f"window's {name} bound is {number}; it counts keys, so it must be 0 or more, or -1 or "
            "None for unlimited"
        )
    return None if number == -1 else number


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale must be a number or None (1/sqrt(D)), not {type(scale).__name__}; a "
            "tensor that scales the scores can be captured by a score_mod"
        )
    number = float(scale)
    if not math.isfinite(number) or abs(number) > LARGEST_FLOAT32:
        raise ValueError(f"scale is {number}; it must be finite in float32")
    return number
