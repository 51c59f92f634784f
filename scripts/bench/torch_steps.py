"""Steps of a model under torch on a GPU, timed as `quern bench` times its own: what the scripts for peers share."""

import statistics
import time

from quern.base.fault import RESOURCES, Fault
from quern.base.figures import three_digits


def add_arguments(parser, config, warmup, steps):
    parser.add_argument("config", help=f"a quern config: {config} and [train] are read")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of it")
    parser.add_argument("--warmup", type=int, default=warmup, help=f"steps before timing (default {warmup})")
    parser.add_argument("--steps", type=int, default=steps, help=f"timed steps (default {steps})")
    parser.add_argument("--mode", default="default", help="of torch.compile (default: default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def need_gpu(torch):
    if not torch.cuda.is_available():
        raise Fault("torch", "no GPU", code=RESOURCES)


def timed_steps(torch, model, micro_loss, accumulation, decay, options):
    """Seconds of each timed step with fused AdamW, and the last loss. `micro_loss(number)` is of a micro-batch, divided by
    `accumulation`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    seconds = []
    for step in range(options.warmup + options.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(accumulation):
            loss = micro_loss(number)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - begin)
    return seconds, loss.item() * accumulation


def result(torch, unit, count, seconds, **more):
    """Figures of steps of `count` tokens or images."""
    return {
        f"{unit}_per_second": count / statistics.median(seconds),
        "slowest": count / max(seconds),
        "fastest": count / min(seconds),
        **more,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def line(figures, unit, name, shape):
    return (f"{three_digits(figures[f'{unit}_per_second'])} {name}/s (from {three_digits(figures['slowest'])} to "
            f"{three_digits(figures['fastest'])}), {shape}, peak {figures['peak_bytes'] / 2**30:.1f} GiB, torch "
            f"{figures['torch']}, {figures['device']}")
