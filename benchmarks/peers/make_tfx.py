"""Makes what the engines read, in tfx's own environment: ``python make_tfx.py NAME FOLDER OPTIONS``.

FOLDER/model.json says which model: ``config`` of the reference encoder and ``batches``, or ``checkpoint`` and
``texts``; both with ``sizes``.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from workloads import alone, docstrings, feeds

from tfx.errors import InputError

if TYPE_CHECKING:
    from tfx.exporter.sources import Source

_DEFAULTS = {"layout": "padded", "precision": "fp32"}  # of an export that has no such option yet


def encoder(folder: Path, model: dict[str, Any], out: Path) -> None:
    """Write the weights, the feeds of every batch and of single rows, and what torch answers."""
    import torch
    from safetensors.torch import save_file

    from tfx.exporter.sources import reference
    from tfx.models.config import EncoderConfig

    config = EncoderConfig(**model["config"])
    source = reference(config)
    (out / "config.json").write_text(json.dumps(config.to_json()), encoding="utf-8")
    save_file(
        {name: value.contiguous() for name, value in source.module.state_dict().items()}, out / "state.safetensors"
    )
    for name, lengths in model["batches"].items():
        arrays = feeds(lengths, config.vocab_size)
        np.savez(out / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]
        for row in alone(lengths) if len(lengths) > 1 else ():
            single = {key: array[row : row + 1, : lengths[row]] for key, array in arrays.items()}
            np.savez(out / f"{name}.row{row}.npz", **single)  # pyright: ignore[reportArgumentType]
        with torch.inference_mode():
            answer = source.module(**{key: torch.from_numpy(array) for key, array in arrays.items()})
        np.save(out / f"{name}.npy", answer["last_hidden_state"].numpy())


def corpus(folder: Path, model: dict[str, Any], out: Path) -> None:
    """Write the texts, how many tokens they have, single texts, and other texts to calibrate with."""
    from tokenizers import Tokenizer

    count = model["texts"]
    found = docstrings(count + 100)
    texts = found[:count]
    shutil.copytree(model["checkpoint"], out / "checkpoint", dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(out / "checkpoint" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(model["max_length"])
    lengths = [len(each.ids) for each in tokenizer.encode_batch(texts)]
    (out / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    (out / "calibration.json").write_text(json.dumps(found[count:]), encoding="utf-8")
    (folder / "tokens.json").write_text(json.dumps(sum(lengths)), encoding="utf-8")
    for row in alone(lengths):
        (out / f"row{row}.json").write_text(json.dumps([texts[row]]), encoding="utf-8")


def bundle(model: dict[str, Any], out: Path, options: dict[str, str]) -> None:
    """Export a bundle.

    Raises:
        InputError: this tfx has no such option.
    """
    from tfx.exporter.export import export

    known = inspect.signature(export).parameters
    for name, value in options.items():
        if name not in known and value != _DEFAULTS[name]:
            raise InputError(f"tfx.export has no option {name}={value}")
    wanted: dict[str, Any] = {name: value for name, value in options.items() if name in known}
    export(lambda: _source(model), out, force=True, step=lambda what: print(what, file=sys.stderr), **wanted)


def _source(model: dict[str, Any]) -> Source:
    if "config" in model:
        from tfx.exporter.sources import reference
        from tfx.models.config import EncoderConfig

        return reference(EncoderConfig(**model["config"]))
    from tfx.exporter.checkpoint import checkpoint

    return checkpoint(model["checkpoint"])


def plain(folder: Path, model: dict[str, Any], path: Path) -> None:
    """Write what ``torch.onnx.export(dynamo=True)`` makes of the encoder with its own defaults."""
    import torch

    from tfx.exporter.sources import reference
    from tfx.models.config import EncoderConfig

    config = EncoderConfig(**model["config"])
    arrays = feeds([8, 5], config.vocab_size)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=config.max_len)
    module = reference(config).module
    with torch.inference_mode():
        torch.onnx.export(
            module,
            kwargs={name: torch.from_numpy(array) for name, array in arrays.items()},
            f=path,
            dynamo=True,
            dynamic_shapes={name: {0: batch, 1: sequence} for name in arrays},
            input_names=list(arrays),
            output_names=["last_hidden_state"],
            external_data=False,
            verbose=False,
        )


def floor(model: dict[str, Any], path: Path, kind: str) -> None:
    """Write the matrix products of all layers side by side: q, k and v as one, the output, and two of the feed-forward.

    Args:
        model: with the sizes ``d_model``, ``d_ff`` and ``layers``.
        path: the file to write.
        kind: ``fp32`` (MatMul) or ``int8`` (MatMulInteger, u8 by s8, sums left as they are).
    """
    import onnx_ir as ir

    d, inner, layers = (model["sizes"][name] for name in ("d_model", "d_ff", "layers"))
    rng = np.random.default_rng(0)
    kinds = {"fp32": (ir.DataType.FLOAT, ir.DataType.FLOAT), "int8": (ir.DataType.UINT8, ir.DataType.INT32)}
    of, result = kinds[kind]
    inputs = {
        width: ir.val(f"x{width}", dtype=of, shape=ir.Shape(["tokens", width])) for width in dict.fromkeys((d, inner))
    }
    nodes, weights, outputs = [], [], []
    for layer in range(layers):
        for name, rows, columns in (("qkv", d, 3 * d), ("out", d, d), ("up", d, inner), ("down", inner, d)):
            values = rng.integers(-127, 128, (rows, columns))
            array = values.astype(np.int8) if kind == "int8" else (values / 127).astype(np.float32)
            weight = ir.val(f"{name}{layer}", const_value=ir.tensor(array, name=f"{name}{layer}"))
            weights.append(weight)
            node = ir.node("MatMulInteger" if kind == "int8" else "MatMul", [inputs[rows], weight])
            node.outputs[0].name = f"{name}{layer}_product"
            node.outputs[0].dtype = result
            node.outputs[0].shape = ir.Shape(["tokens", columns])
            nodes.append(node)
            outputs.append(node.outputs[0])
    graph = ir.Graph(
        list(inputs.values()), outputs, nodes=nodes, initializers=weights, opset_imports={"": 17}, name="floor"
    )
    ir.save(ir.Model(graph, ir_version=8), path)


def main() -> None:
    """Make one file or folder."""
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    out = folder / name
    if name in ("encoder", "corpus"):
        out.mkdir(exist_ok=True)
        (encoder if name == "encoder" else corpus)(folder, model, out)
    elif name == "plain.onnx":
        plain(folder, model, out)
    elif name.startswith("floor-"):
        floor(model, out, name.removeprefix("floor-").removesuffix(".onnx"))
    else:
        bundle(model, out, options)


if __name__ == "__main__":
    main()
