"""quern.Run: a run, step by step."""

import ctypes
import json
import math
import numbers
import os
import pathlib
import tomllib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quern.base.fault import Fault
from quern.driver.config import Config, path_text, resolved
from quern.driver.dlpack import DTYPES, TensorView
from quern.driver.error import Error, UnknownKey, WrongType, WrongValue, error_of, refused
from quern.driver.library import FLOATS, Callback, check, library, number, take_text
from quern.driver.rows import Rows

if TYPE_CHECKING:
    from quern.driver.prompts import PromptTokenizer

Path: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Step:
    """Where a run is after a step. A float that there is none of is NaN."""

    step: int  #: optimizer steps finished
    tokens: int  #: that these steps trained on
    loss: float  #: nats a target
    gradient_norm: float  #: before clipping
    learning_rate: float
    seconds: float  #: that the step took, without evaluation and checkpoint
    validation_loss: float  #: nats a target, of the last evaluation


@dataclass(frozen=True)
class DataLoss:
    """The loss over some data."""

    name: str  #: of the token file; "validation" of other data
    loss: float  #: nats a target
    perplexity: float
    targets: int  #: that count
    accuracy: float  #: the share of these that is predicted right, of a model with classes; else NaN
    tokens: int  #: in whole windows
    seconds: float


@dataclass(frozen=True)
class Text:
    """A continuation of a prompt."""

    tokens: list[int]  #: without the prompt's
    finish: str  #: "length", or "stop" at a token that ends a text
    text: str | None = None  #: of the prompt and the continuation; None: the prompt was tokens


@dataclass(frozen=True)
class Tensor:
    """A tensor of a run's state."""

    name: str  #: as in checkpoints: "master/qkv.weight/3", "moment1/qkv.weight/3"; "gradient/qkv.weight/3"
    dtype: str  #: as it is kept: "f32", "bf16"
    shape: tuple[int, ...]  #: over all ranks


class Run:
    """A run of quern, from its config to its export; the config's file alone gives the same bits with `quern train`.

        with quern.Run(quern.Config.load("run.toml")) as run:
            for step in run:
                print(step.step, step.loss)

    Its first use opens it: steps (also `learning_rate`) for training, `evaluate`, `export` and `tensors` for
    evaluation of the newest checkpoint or of `weights`; beside that, `generate` keeps weights of its own. A run that trains
    also evaluates, exports and reads tensors, and generates where the config has sample.every. Evaluation does not change
    the training state.

    The end of `with` saves every finished step, whatever ends it; so does Ctrl-C inside a step, which is cut short, and
    KeyboardInterrupt follows, as it does at the next batch of `evaluate` and token of `generate`; SIGTERM, SIGHUP and SIGXCPU do, where the program left them alone, at the next step, and then
    end the process. The same signal a second later ends it at once. A process that is killed leaves the config's checkpoints. A run continues from its newest checkpoint: make it again.

    Of several ranks (quern.launch, torchrun), all make the same calls, with the same answers: tensors are gathered.

    A run that nobody refers to any more is freed without saving. A child that fork made cannot use its parent's runs.

    Faults are quern.Error; a wrong value or type is a ValueError or TypeError too, an unknown tensor a KeyError. For one
    thread at a time, and not from inside on_event or data; other threads go on while it works.
    """

    def __init__(
        self, config: Config | Path | Mapping[str, Any], *, weights: Path = "", data: Iterable[Any] | None = None,
        validation: Iterable[Any] | None = None, on_event: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """`config`: a Config, a TOML file, or a dict. Opens neither device nor data.

        weights     a checkpoint, a run's directory or a Hugging Face model directory to evaluate; default: the newest
                    checkpoint of the run
        data        rows of tokens to train on in this order, in place of the config's data: an iterable of int arrays
                    (train.sequence + 1,), or of mappings with `tokens`, `mask` and `documents` (quern.driver.rows)
        validation  the same for evaluation, with a length; default: none
        on_event    is called with each event of the log, a dict as in log.jsonl, beside the config's log.sinks
        """
        if isinstance(config, Mapping):
            config = Config.from_dict(config)
        elif not isinstance(config, Config):
            config = Config.load(config)
        self.weights = path_text("weights", weights)
        self.finished = False  #: whether all steps are done, and the last evaluation, checkpoint and export
        self._moves = False  # whether it has made a step
        self._program = Program(data, validation, on_event)
        self._callback = Callback(self._program.answer)
        if validation is not None and (data is None or not hasattr(validation, "__len__")):
            raise refused(WrongValue, "validation", "cannot be evaluated on", expected="rows with a length, beside data")
        if data is not None:
            config = config.set("data.id", "python")
            if not hasattr(data, "__len__") and self._resolved(config)["train"]["epochs"]:
                raise refused(WrongValue, "data", "has no end", expected="rows with a length, whose passes train.epochs counts")
        if on_event is not None:
            config = config.set("log.sinks", [*self._resolved(config)["log"]["sinks"], "python"])
        handle = ctypes.c_void_p()
        check(library().quern_make(config.as_json(), self._callback.pointer, ctypes.byref(handle)))
        self._handle = handle
        self._memory: Memory | None = Memory(handle, self._callback)

    def _resolved(self, config: Config) -> dict[str, Any]:
        """The tables of a config that may select what this run brings."""
        return tomllib.loads(resolved(config, self._callback).text or "")

    # ---- training ----

    def __iter__(self) -> Iterator[Step]:
        """Steps up to the config's end."""
        while step := self.step():
            yield step

    def step(self) -> Step | None:
        """One step, with the samples, evaluation and checkpoint that are due. None: no step was left, and the run's last
        evaluation, checkpoint and export are done."""
        return self._moved(self._call("step"))

    def save(self) -> None:
        """Saves the newest finished step; returns when it is written."""
        self._call("save")

    @property
    def position(self) -> Step:
        """Where the run is: after the last step."""
        return step_of(self._call("position"))

    @property
    def learning_rate(self) -> float:
        """Of the next step: the schedule's, unless one is set. None sets it back to the schedule's. Not saved."""
        return float(self._call("learning_rate"))

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        self._call("set_learning_rate", rate=None if rate is None else real("learning_rate", rate))

    # ---- weights ----

    def evaluate(self, files: Sequence[Path] = ()) -> list[DataLoss]:
        """The loss over each of these token files (or patterns); none: over the validation split."""
        if isinstance(files, (str, bytes)) or not isinstance(files, Iterable):
            raise refused(WrongType, "files", "not a list", type(files).__name__, "a list of token files")
        losses = self._call("evaluate", files=[path_text("files", file) for file in files], weights=self.weights)
        return [DataLoss(**loss | {"targets": int(loss["targets"]), "accuracy": number(loss["accuracy"])}) for loss in losses]

    def generate(
        self, prompts: Sequence[str | Sequence[int]], *, max_tokens: int = 64, temperature: float = 1.0, top_p: float = 1.0,
        seed: int = 1, stop: Sequence[int] | None = None,
    ) -> list[Text]:
        """Continuations of prompts, in their order. A prompt is a text, for checkpoint.tokenizer, or tokens.

        temperature  logits are divided by it; 0: always the most likely token
        top_p        in (0, 1]: draws among the most likely tokens that together have this probability
        stop         tokens that end a text; default: as the model or tokenizer has them
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise refused(WrongType, "prompts", "not a list", type(prompts).__name__, "a list of texts or of lists of tokens")
        tokenizer = self._tokenizer() if any(isinstance(prompt, str) for prompt in prompts) else None
        encoded = [tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else tokens_in("prompts", prompt)
                   for prompt in prompts]
        texts = self._call(
            "generate", prompts=encoded, max_tokens=whole("max_tokens", max_tokens), temperature=real("temperature", temperature),
            top_p=real("top_p", top_p), seed=whole("seed", seed), weights=self.weights,
            stop=None if stop is None else tokens_in("stop", stop))
        return [Text(**text, text=tokenizer.decode([*tokens, *text["tokens"]])
                     if tokenizer and isinstance(prompt, str) else None)
                for prompt, tokens, text in zip(prompts, encoded, texts, strict=True)]

    def export(self, place: Path, to: Literal["hf", "gguf"] = "hf") -> None:
        """The weights as a Hugging Face model directory, or as a GGUF file; it replaces an older export when it is
        complete."""
        if to not in ("hf", "gguf"):
            raise refused(WrongValue, "to", "unknown format", repr(to), "'hf' or 'gguf'")

        def export(folder: Path) -> bool:
            return bool(self._call("export", directory=path_text("place", folder), weights=self.weights)["written"])

        if to == "hf":
            export(place)
            return
        from quern.models.export_gguf import export_as_gguf  # needs the package gguf

        try:
            export_as_gguf(export, pathlib.Path(path_text("place", place)))
        except Fault as fault:
            raise error_of(fault) from None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the run's state by name: masters and, where it trains, the optimizer's moments and gradients. A
        gradient is of the last step's loss, summed over its targets, before clipping."""
        self._call("open", training=False, weights=self.weights)
        return {tensor["name"]: Tensor(tensor["name"], tensor["dtype"], tuple(tensor["shape"]))
                for tensor in self._call("tensors")}

    def read(self, tensor: str) -> NDArray[np.float32]:
        """A copy of a tensor, which DLPack gives to other libraries: torch.from_dlpack(run.read(name))."""
        values = np.empty(self._tensor(tensor).shape, np.float32)
        check(library().quern_read(self._open(), tensor.encode(), values.ctypes.data_as(FLOATS), values.size))
        return values

    def view(self, tensor: str) -> TensorView:
        """A tensor in the device's memory, without a copy: torch.from_dlpack(run.view(name)), cupy's or numpy's. Only of
        tensors that are whole there: not sharded, and not in an offload store. Read it before the run's next call, which
        may change it; change it with `write`."""
        known = self._tensor(tensor)
        if known.dtype not in DTYPES:
            raise refused(WrongValue, tensor, "has no view", known.dtype, f"the dtype {' or '.join(DTYPES)}")
        place = self._call("place", tensor=tensor)
        return TensorView(known.shape, known.dtype, place["device"], place["unit"],
                          lambda: int(self._call("place", tensor=tensor)["data"]), self._memory)

    def write(self, tensor: str, values: Any) -> None:
        """Replaces a tensor, rounded to its dtype. `values`: an array of its shape, or one that DLPack can read in the
        memory of the CPU."""
        shape = self._tensor(tensor).shape
        foreign = hasattr(values, "__dlpack__") and not isinstance(values, np.ndarray)
        given = np.from_dlpack(values) if foreign else np.asarray(values)
        if given.shape != shape:
            raise refused(WrongValue, tensor, "wrong shape", str(given.shape), str(shape))
        if given.dtype.kind not in "biuf" or np.ma.isMaskedArray(values):
            found = "a masked array" if np.ma.isMaskedArray(values) else str(given.dtype)
            raise refused(WrongType, tensor, "no numbers", found, "an array of real numbers")
        if not np.isfinite(given).all():
            raise refused(WrongValue, tensor, "numbers that are not finite", "NaN or infinity", "finite numbers")
        exact = np.ascontiguousarray(given, np.float32)
        check(library().quern_write(self._open(), tensor.encode(), exact.ctypes.data_as(FLOATS), exact.size))

    # ---- config and plan ----

    def config(self) -> Config:
        """The resolved config."""
        return Config.from_text(self._call("config"))

    def plan(self) -> str:
        """Memory, work and time of the run, as `quern plan` prints it. Opens nothing."""
        return str(self._call("plan"))

    def planned_config(self) -> Config:
        """The config with the planner's choices in place of "auto"."""
        return Config.from_text(self._call("chosen_config"))

    # ---- the end ----

    def close(self) -> None:
        """Saves every finished step of a run that trains, and frees everything; memory that other libraries view, when they
        are done."""
        if self._memory and not self._memory.of_parent:
            self._call("pass")  # before anything is freed
            try:
                if (answer := self._call("stop")) is not None:
                    self._moved(answer)
            finally:
                self._memory = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the library ----

    def _open(self) -> ctypes.c_void_p:
        if not self._memory:
            raise refused(WrongValue, "Run", "it is closed", next_step="make another one, which continues")
        if self._memory.of_parent:
            raise refused(Error, "Run", "it is of the process that forked this one", next_step="make another one here")
        return self._handle

    def _call(self, method: str, **arguments: Any) -> Any:
        answer = ctypes.c_void_p()
        try:
            check(library().quern_call(self._open(), method.encode(), json.dumps(arguments).encode(), ctypes.byref(answer)))
        except Error as error:
            raise error from self._callback.raised if error.where.startswith("the program's ") else None
        return json.loads(take_text(answer))

    def _tokenizer(self) -> "PromptTokenizer":
        from quern.driver.prompts import PromptTokenizer  # only texts need the tokenizers

        config = self.config().to_dict()
        folder = config["checkpoint"]["tokenizer"]
        trained = not os.path.exists(os.path.join(self.weights, "config.json")) if self.weights else True
        return PromptTokenizer(folder, config["data"].get("tokens", {}).get("train") if trained else None)

    def _moved(self, answer: dict[str, Any]) -> Step | None:
        for text in answer.get("warnings", ()):
            warnings.warn(text, stacklevel=3)
        self.finished = answer.get("finished", False)
        if number := answer.get("stopped"):  # of a rank: all end as the signal says
            raise SystemExit(128 + number)
        if not answer["moved"] and self.finished and not self._moves:
            warnings.warn(f"the run has all its {answer['position']['step']} steps already; raise train.steps to train on, or "
                          "choose another log.directory for a new run", stacklevel=4)
        self._moves = True  # or it was said
        return step_of(answer["position"]) if answer["moved"] else None

    def _tensor(self, name: str) -> Tensor:
        tensors = self.tensors()
        if name not in tensors:
            raise refused(UnknownKey, "Run", "no such tensor", repr(name),
                          f"one of Run.tensors(): {next(iter(tensors))} and {len(tensors) - 1} others")
        return tensors[name]


class Program:
    """What the library asks the program for. It does not refer to the Run, so that nothing but the program keeps that."""

    def __init__(
        self, data: Iterable[Any] | None, validation: Iterable[Any] | None, on_event: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        self._rows = {"train": None if data is None else Rows(data),
                      "validation": None if validation is None else Rows(validation)}
        self._on_event = on_event

    def answer(self, method: str, arguments: dict[str, Any]) -> str:
        if method == "log":
            assert self._on_event
            self._on_event(arguments)
            return ""
        if method == "validates":
            return "yes" if self._rows["validation"] else "no"
        rows = self._rows[arguments["split"]]
        if rows is None:
            raise ValueError(f"Run was given no rows for {arguments['split']}")
        if method == "load_state":
            rows.load_state(arguments["state"])
        elif method == "next":
            rows.fill(arguments)
        else:
            return rows.length() if method == "length" else rows.save_state()
        return ""


class Memory:
    """Keeps a run of the library, until nobody refers to this."""

    def __init__(self, handle: ctypes.c_void_p, callback: Callback) -> None:
        self.of_parent = False
        self._end = weakref.finalize(self, close, handle, callback.thunk)
        memories.add(self)

    def leave(self) -> None:
        """In a child that fork made, which has none of the run's threads."""
        self.of_parent = True
        self._end.detach()


memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def close(handle: ctypes.c_void_p, _thunk: object) -> None:  # which lives until then
    check(library().quern_close(handle))


def leave_to_parent() -> None:
    if len(memories):
        library().quern_forked()
    for memory in memories:
        memory.leave()


os.register_at_fork(after_in_child=leave_to_parent)


def whole(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or not -(2**63) <= int(value) < 2**63:
        raise refused(WrongValue, name, "wrong value", shown(value), "an integer of 64 bits")
    return int(value)


def real(name: str, value: object) -> float:
    try:
        if isinstance(value, numbers.Real) and math.isfinite(number := float(value)):
            return number
    except OverflowError:
        pass
    raise refused(WrongValue, name, "wrong value", shown(value), "a finite number")


def tokens_in(name: str, values: Any) -> list[Any]:
    """As the library checks them."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise refused(WrongType, name, "not a list of tokens", shown(values), "integers")
    return [int(value) if isinstance(value, numbers.Integral) else float(value) if isinstance(value, numbers.Real)
            else str(value) for value in values]


def shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def step_of(position: dict[str, Any]) -> Step:
    return Step(**{name: number(value) for name, value in position.items()})
