"""A source from a folder in the form of Hugging Face transformers or of sentence-transformers.

Nothing is downloaded and no code from the folder is run. Whether a weight is used, where positions start and how
long a sequence may be is observed on the loaded model (`probe`), not looked up by architecture.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import SourceError
from ..models.pooling import Pooled, PoolMode
from ..runtime.tensors import TensorSpec, make_feeds
from .probe import first_line, probe
from .sources import Source

__all__ = ["checkpoint"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_VECTOR = "sentence_embedding"
_MODES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "Sigmoid": nn.Sigmoid}


def checkpoint(
    path: str | Path, pooling: str | None = None, normalize: bool | None = None, allow_pickle: bool = False
) -> Source:
    """Load a checkpoint folder, offline, in float32.

    Args:
        path: the folder: `config.json` and weights, or the `modules.json` of sentence-transformers.
        pooling: "none", "cls", "mean", "max" or "last"; None takes what the folder says.
        normalize: scale the sentence vector to length 1; None takes what the folder says.
        allow_pickle: read `pytorch_model.bin` when there is no safetensors file; only tensors are unpickled.

    Returns:
        The source, with `last_hidden_state` and, with pooling, `sentence_embedding` as outputs.

    Raises:
        SourceError: the folder, its weights, its architecture or one of its modules cannot be used.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise SourceError(f"checkpoint {path}: {found}, wanted a folder on this machine (nothing is downloaded)")
    root, head = _sentence_head(folder)
    files = _weight_files(root, allow_pickle)
    model, implementation = _load(root, pickled=files[0].suffix == ".bin")
    inputs = _inputs(model, root)
    head = _override(head, pooling, normalize, folder)
    module: nn.Module = model
    if head is not None:
        module = Pooled(model, head.mode, head.normalize and not head.layers)
        if head.layers:
            module = _Headed(module, head.layers, head.normalize)
    module.eval()
    found = probe(module, inputs, lambda feeds: module(**feeds))
    declared = getattr(model.config, "max_position_embeddings", None)
    max_length = found.max_length or (declared if isinstance(declared, int) and declared > 0 else None)
    pad_id = getattr(model.config, "pad_token_id", None)
    tokenizer, copied = _tokenizer(root, max_length)
    known = found.counts["attention"] and found.counts["attention"] == getattr(model.config, "num_hidden_layers", None)
    return Source(
        module=module,
        inputs=tuple(TensorSpec(s.name, s.dtype, s.shape, s.role, found.limits.get(s.name, s.limit)) for s in inputs),
        kind="checkpoint",
        name=folder.resolve().name,
        sha256=_hash(files + (head.files if head else ())),
        expected=dict(found.counts) if known else None,
        max_length=max_length,
        pad_id=pad_id if isinstance(pad_id, int) and pad_id >= 0 else found.pad_id or 0,
        pooling={"mode": head.mode, "normalize": head.normalize, "output": _VECTOR} if head else None,
        tokenizer=tokenizer,
        files=copied,
        output_names=("last_hidden_state", _VECTOR) if head else ("last_hidden_state",),
        notes={"attn_implementation": implementation},
    )


@dataclass(frozen=True)
class _Head:
    """What makes the sentence vector: pooling, dense layers, normalization."""

    mode: PoolMode
    normalize: bool
    layers: tuple[nn.Module, ...] = ()
    files: tuple[Path, ...] = ()


class _Headed(nn.Module):
    """Dense layers, and perhaps normalization, after the pooling."""

    def __init__(self, pooled: nn.Module, layers: tuple[nn.Module, ...], normalize: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.dense = nn.Sequential(*layers)
        self.normalize = normalize

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        outputs = self.pooled(**inputs)
        vector = self.dense(outputs[_VECTOR])  # (B, d) -> (B, out_features)
        return {**outputs, _VECTOR: F.normalize(vector, dim=1) if self.normalize else vector}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON: {first_line(error)}") from error


def _object(path: Path) -> dict[str, Any]:
    value = _json(path)
    if not isinstance(value, dict):
        raise SourceError(f"{path}: found {type(value).__name__}, wanted a JSON object")
    return value


def _inside(folder: Path, name: object, where: Path) -> Path:
    """Return folder/name, refusing names that lead out of the folder."""
    if not isinstance(name, str) or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise SourceError(f"{where}: found path {name!r}, wanted one inside the folder")
    return folder / name


def _sentence_head(folder: Path) -> tuple[Path, _Head | None]:
    """Return the transformer's folder and the head that `modules.json` describes, None without one."""
    listing = folder / "modules.json"
    if not listing.exists():
        return folder, None
    entries = _json(listing)
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "type" in e for e in entries):
        raise SourceError(f"{listing}: wanted a list of modules with type and path")
    parts = [(str(e["type"]).rpartition(".")[2], _inside(folder, e.get("path", ""), listing)) for e in entries]
    if not parts or parts[0][0] != "Transformer":
        raise SourceError(f"{listing}: found {parts[0][0] if parts else 'nothing'} first, wanted Transformer")
    mode: PoolMode | None = None
    normalize = False
    layers: list[nn.Module] = []
    files: list[Path] = []
    for kind, place in parts[1:]:
        if kind == "Pooling" and mode is None:
            mode = _pooling_mode(place / "config.json")
        elif kind == "Normalize" and mode is not None:
            normalize = True
        elif kind == "Dense" and mode is not None and not normalize:
            layer, weights = _dense(place)
            layers.append(layer)
            files.append(weights)
        elif kind != "Dropout":  # does nothing at inference
            raise SourceError(
                f"{listing}: module {kind} at this place is not supported, wanted Pooling, Dense, Normalize"
            )
    return parts[0][1], _Head(mode, normalize, tuple(layers), tuple(files)) if mode else None


def _pooling_mode(path: Path) -> PoolMode:
    config = _object(path)
    found = config.get("pooling_mode")
    if found is None:  # one flag a mode, before sentence-transformers 6
        flags = (key for key, value in config.items() if key.startswith("pooling_mode_") and value is True)
        found = [flag.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for flag in flags]
    names = [found] if isinstance(found, str) else list(found)
    if len(names) != 1 or names[0] not in _MODES:
        raise SourceError(
            f"{path}: found pooling {' + '.join(map(str, names)) or 'none'}, wanted one of {', '.join(_MODES)}"
        )
    return cast(PoolMode, _MODES[names[0]])


def _dense(folder: Path) -> tuple[nn.Module, Path]:
    """Return y = act(W x + b) and its weight file."""
    config = _object(folder / "config.json")
    kind = str(config.get("activation_function", "")).rpartition(".")[2]
    if kind not in _ACTIVATIONS or config.get("module_input_name", _VECTOR) != _VECTOR:
        raise SourceError(
            f"{folder}: Dense with {kind or 'no activation'} on {config.get('module_input_name', _VECTOR)} is not "
            f"supported, wanted one of {', '.join(_ACTIVATIONS)} on {_VECTOR}"
        )
    path = folder / "model.safetensors"
    if not path.exists():
        raise SourceError(f"{folder}: no model.safetensors for the Dense module")
    _check_safetensors(path)
    weights = load_file(path)
    bias = bool(config.get("bias", True))
    try:
        layer = nn.Linear(int(config["in_features"]), int(config["out_features"]), bias=bias)
        layer.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in weights.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SourceError(f"{path}: does not fit its config.json: {first_line(error)}") from error
    return nn.Sequential(layer, _ACTIVATIONS[kind]()), path


def _override(head: _Head | None, pooling: str | None, normalize: bool | None, folder: Path) -> _Head | None:
    """Apply what the caller asked for to what the folder says."""
    modes = get_args(PoolMode)
    if pooling not in (None, "none", *modes):
        raise SourceError(f"pooling: found {pooling!r}, wanted one of none, {', '.join(modes)}")
    if pooling == "none" or (pooling is None and head is None):
        if normalize:
            raise SourceError(f"normalize: {folder} gives no sentence vector to normalize, wanted a pooling")
        return None
    base = head or _Head("mean", normalize=False)
    mode = base.mode if pooling is None else cast(PoolMode, pooling)
    return _Head(mode, base.normalize if normalize is None else normalize, base.layers, base.files)


def _weight_files(folder: Path, allow_pickle: bool) -> tuple[Path, ...]:
    """Return the weight files, each checked to be whole."""
    if not (folder / "config.json").exists():
        what = "empty folder" if not any(folder.iterdir()) else "no config.json"
        raise SourceError(f"checkpoint {folder}: {what}, wanted config.json and model.safetensors")
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = folder / f"{stem}{suffix}.index.json"
        if (folder / f"{stem}{suffix}").exists():
            files = (folder / f"{stem}{suffix}",)
        elif index.exists():
            shards = _object(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise SourceError(f"{index}: no weight_map")
            files = tuple(_inside(folder, name, index) for name in sorted(set(shards.values())))
        else:
            continue
        for file in files:
            if not file.is_file():
                raise SourceError(f"{file}: missing, but {index.name} lists it")
        if suffix == ".bin" and not allow_pickle:
            raise SourceError(
                f"checkpoint {folder}: only pickle weights ({files[0].name}); convert them to safetensors, or "
                "trust them with --allow-pickle"
            )
        if suffix == ".safetensors":
            for file in files:
                _check_safetensors(file)
        return files
    raise SourceError(f"checkpoint {folder}: no weights, wanted model.safetensors")


def _check_safetensors(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path}: not a whole safetensors file ({path.stat().st_size} bytes): {error}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the log and the progress bars of transformers from the user."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load(folder: Path, *, pickled: bool) -> tuple[Any, str]:
    """Return the model, every used weight from the folder, and the attention implementation it runs."""
    from transformers import AutoConfig, AutoModel

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _silent():
            config = AutoConfig.from_pretrained(folder, **local)
            if getattr(config, "is_encoder_decoder", False):
                raise SourceError(f"checkpoint {folder}: {config.model_type} is an encoder-decoder, wanted an encoder")
            config.use_cache = False
            options = {"config": config, "dtype": torch.float32, "use_safetensors": not pickled, **local}
            # sdpa stays one Attention node in the graph; models without it say so by a ValueError.
            for implementation in ("sdpa", "eager"):
                try:
                    model, info = AutoModel.from_pretrained(
                        folder, attn_implementation=implementation, output_loading_info=True, **options
                    )
                    break
                except ValueError:
                    if implementation == "eager":
                        raise
            else:
                raise AssertionError
    except (SourceError, MemoryError):
        raise
    except Exception as error:
        raise SourceError(f"checkpoint {folder}: {first_line(error)}") from error
    _check_missing(model.eval(), info, folder)
    return model, implementation


def _inputs(model: Any, folder: Path) -> tuple[TensorSpec, ...]:
    """Return the inputs that the model's forward takes."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("input_ids", "attention_mask"):
        if name not in parameters:
            raise SourceError(f"checkpoint {folder}: {type(model).__name__} takes no {name}, wanted a text encoder")
    axes = ("batch", "sequence")
    segments = getattr(model.config, "type_vocab_size", None) or 0
    inputs = [
        TensorSpec("input_ids", "int64", axes, "token_ids", getattr(model.config, "vocab_size", None)),
        TensorSpec("attention_mask", "int64", axes, "attention_mask", 2),
    ]
    # With one segment type there is nothing to say.
    if "token_type_ids" in parameters and segments > 1:
        inputs.append(TensorSpec("token_type_ids", "int64", axes, "token_type_ids", segments))
    return tuple(inputs)


def _check_missing(model: Any, info: Mapping[str, Any], folder: Path) -> None:
    """Refuse weights that transformers made up, unless the hidden states do not depend on them."""
    missing = set(info["missing_keys"]) | {key[0] for key in info.get("mismatched_keys", ())}
    if not missing:
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    used = missing - set(parameters)
    suspects = {name: parameters[name] for name in missing & set(parameters)}
    if suspects:
        feeds = make_feeds(_inputs(model, folder), batch=2, sequence=3)
        with torch.enable_grad():
            hidden = model(**{name: torch.from_numpy(feed) for name, feed in feeds.items()})["last_hidden_state"]
            # A weight is used exactly if the output has a gradient for it.
            gradients = torch.autograd.grad(hidden.square().sum(), list(suspects.values()), allow_unused=True)
        used |= {name for name, gradient in zip(suspects, gradients, strict=True) if gradient is not None}
    if used:
        names = sorted(used)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise SourceError(f"checkpoint {folder}: weights without a value in the files: {', '.join(names[:3])}{more}")


def _tokenizer(folder: Path, limit: int | None) -> tuple[dict[str, Any] | None, tuple[Path, ...]]:
    """Return {file, max_length} and the files to copy; max_length counts special tokens."""
    path = folder / _TOKENIZER_FILES[0]
    if not path.exists():
        return None, ()
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise SourceError(f"{path}: not a tokenizer: {first_line(error)}") from error
    copied = tuple(folder / name for name in _TOKENIZER_FILES if (folder / name).is_file())
    settings = _object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    sentence: dict[str, Any] = {}
    for file in sorted(folder.glob("sentence_*_config.json")):
        sentence |= _object(file)
    if sentence.get("do_lower_case") and (
        tokenizer.normalizer is None or tokenizer.normalizer.normalize_str("A") != "a"
    ):
        raise SourceError(f"checkpoint {folder}: do_lower_case is set, but {path.name} keeps upper case")
    lengths = [limit, sentence.get("max_seq_length"), settings.get("model_max_length")]
    # "No limit" is written as a number of thirty digits.
    known = [length for length in lengths if isinstance(length, int) and 0 < length < 10**9]
    return {"file": path.name, "max_length": min(known, default=None)}, copied


def _hash(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
