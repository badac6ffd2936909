"""Makes files for onnxruntime, in its environment: ``python make_onnxruntime.py NAME FOLDER OPTIONS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def optimized(source: Path, out: Path, config: dict[str, Any]) -> None:
    """Run onnxruntime.transformers.optimizer as its command line does for BERT."""
    from onnxruntime.transformers.optimizer import optimize_model

    made: Any = optimize_model(str(source), model_type="bert", num_heads=config["heads"], hidden_size=config["d_model"])
    made.save_model_to_file(str(out))


def quantized(source: Path, out: Path) -> None:
    """Run quantize_dynamic with its defaults, s8 weights, after the preparation that its documentation asks for."""
    import onnxruntime.quantization as quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = out.with_suffix(".prepared.onnx")
    try:
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    except Exception as error:  # noqa: BLE001 - then without, as the documentation allows
        print(f"quant_pre_process: {error}", file=sys.stderr)
        prepared = source
    # Of the contrib operators that a fused graph holds it cannot tell the type by itself.
    extra = {"DefaultTensorType": 1}
    quantization.quantize_dynamic(
        str(prepared), str(out), weight_type=quantization.QuantType.QInt8, extra_options=extra
    )
    if prepared != source:
        prepared.unlink(missing_ok=True)


def main() -> None:
    """Make one file."""
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    if name == "optimized.onnx":
        config = json.loads((folder / "encoder" / "config.json").read_text(encoding="utf-8"))
        optimized(folder / "plain.onnx", folder / name, config)
    else:
        quantized(folder / options["of"], folder / name)


if __name__ == "__main__":
    main()
