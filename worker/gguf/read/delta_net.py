"""The tensors of gated delta nets, made from those of a GGUF file.

The oldest files of Qwen3-Next keep its projections grouped by key head (ssm_in, ssm_ba).
"""

from __future__ import annotations

from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.read.tensor_views import TensorView


def delta_net_views(
    rows: DeltaNetRows, name: str, whole: TensorView
) -> dict[str, TensorView] | None:
    """The tensors under `linear_attn` that are made from one of the file; None if it belongs to
    another part of the layer, or has the wrong shape."""
    part = name.split(".", 2)[2]
    if part in ("ssm_in.weight", "ssm_ba.weight"):
        return _grouped(rows, part, whole)
    values = rows.value_heads * rows.value_dim
    both = 2 * rows.key_heads * rows.key_dim + values
    names = {
        "attn_qkv.weight": ("in_proj_qkv.weight", both, rows.qkv_rows),
        "attn_gate.weight": ("in_proj_z.weight", values, rows.value_rows),
        "ssm_beta.weight": ("in_proj_b.weight", rows.value_heads, rows.heads),
        "ssm_alpha.weight": ("in_proj_a.weight", rows.value_heads, rows.heads),
        "ssm_dt.bias": ("dt_bias", rows.value_heads, rows.heads),
        "ssm_a": ("A_log", rows.value_heads, rows.heads),
        "ssm_conv1d.weight": ("conv1d.weight", both, rows.qkv_rows),
    }
    if part == "ssm_norm.weight":
        return {"norm.weight": whole}
    if part == "ssm_out.weight":
        if not rows.tiled or whole.shape[-1] != values:
            return {"out_proj.weight": whole}
        columns = rows.value_rows()
        return {"out_proj.weight": whole.changed(lambda weight: weight[:, columns])}
    if part not in names:
        return None
    ours, count, order = names[part]
    # Rows of another number are reported with the shapes.
    view = whole.with_rows(order()) if rows.tiled and whole.shape[0] == count else whole
    if part == "ssm_a":
        view = view.changed(lambda decays: (-decays).log())
    if part == "ssm_conv1d.weight" and len(whole.shape) == 2:
        channels, kernel = whole.shape
        view = view.changed(lambda weight: weight[:, None], (channels, 1, kernel))
    return {ours: view}


def _grouped(rows: DeltaNetRows, part: str, whole: TensorView) -> dict[str, TensorView] | None:
    if rows.value_heads < rows.key_heads:
        return None
    names = ("in_proj_qkv", "in_proj_z")
    if part == "ssm_ba.weight":
        names = ("in_proj_b", "in_proj_a")
    orders = rows.grouped_rows("ba" if part == "ssm_ba.weight" else "qkvz")
    if whole.shape[0] != sum(map(len, orders)):
        return None
    return {
        f"{name}.weight": whole.with_rows(order) for name, order in zip(names, orders, strict=True)
    }
