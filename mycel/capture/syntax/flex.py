"""torch's FlexAttention in captured code: its functions of an index are evaluated for all pairs, as values of the
program, in which passes find structure (`transform/causal.py`, `transform/documents.py`); what remains of a block mask
is that function, so what else it holds is dead code.

    flex_attention(q, k, v, block_mask=mask)       scaled_dot_product_attention(q, k, v, mask(b, h, row, column))
    flex_attention(q, k, v, score_mod=f, …)        softmax(where(mask, f(q kᵀ · scale, b, h, row, column), -inf)) v

Its module is imported by whoever calls it: it takes long.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from mycel.capture.fence import refuse

MODULE = "torch.nn.attention.flex_attention"


def flex_rule(fn: Any) -> Callable[..., Any] | None:
    """What to call for a function of FlexAttention, compiled or not, while code is traced."""
    if not isinstance(fn, types.FunctionType):
        return None
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    rule = _RULES.get(fn.__name__) if fn.__module__ == MODULE else None
    return None if rule is None else functools.partial(rule, sys.modules[MODULE])


def _create_block_mask(module: Any, *args: Any, _compile: bool = False, **kwargs: Any) -> Any:
    return module.create_block_mask(*args, **kwargs)


def _flex_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    asks = return_lse or (return_aux is not None and return_aux.lse)
    if return_aux is not None and return_aux.max_scores:
        raise refuse("flex_attention: the largest score of each row is not captured", "AuxRequest(lse=True)")
    mask = None if block_mask is None else _mask(module, block_mask, query, key)
    scores = _scores(module, query, key, score_mod, mask, scale) if score_mod is not None or asks else None
    if score_mod is None:
        y = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=enable_gqa
        )  # fmt: skip
    else:
        assert scores is not None
        y = scores.softmax(-1).to(query.dtype) @ _repeated(value, query)
    if not asks:
        return y if return_aux is None else (y, module.AuxOutput())
    assert scores is not None
    lse = scores.logsumexp(-1)
    return (y, lse) if return_aux is None else (y, module.AuxOutput(lse=lse))


def _mask(module: Any, block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A block mask for all pairs."""
    b, h = block_mask.shape[:2]
    mask: torch.Tensor = module.create_mask(
        block_mask.mask_mod, b, h, query.shape[2], key.shape[2], device=query.device
    )
    return mask


def _scores(module: Any, query: Any, key: Any, score_mod: Any, mask: Any, scale: float | None) -> torch.Tensor:
    """Scores of all pairs in 32 bits or more, changed and masked."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ _repeated(key, query).transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if score_mod is not None:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        places = [torch.arange(n, device=query.device) for n in scores.shape]
        with TransformGetItemToIndex():
            scores = module._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Shared heads, once for each of the query's."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


_RULES: dict[str, Callable[..., Any]] = {"flex_attention": _flex_attention, "create_block_mask": _create_block_mask}
