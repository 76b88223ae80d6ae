"""The README and the guide can be read and searched: short sentences, plain words, headings that people look for."""

import re

import pytest

from tests.docs import prose
from tests.helpers import spmd

WORDS_A_SENTENCE = 35
COLUMNS, COLUMNS_OF_CODE, LINES_OF_README = 120, 88, 120

# Words of this project's own, or of nobody's, and what the field says instead.
PRIVATE_WORDS = {
    "kin": "name them, or `such as`",
    "vote": "request",
    "wish": "request",
    "room": "package",
    "house": "code base",
    "addend": "term",
    "anew": "again",
    "alike": "the same",
    "told of": "reported",
    "tells of": "reports",
    "shared out": "sharded",
    "share out": "shard",
    "share the rows out": "shard the rows",
    "shares out": "shards",
    "handed out": "dispatched",
    "hands out": "dispatches",
    "taken in": "adopted, or made distributed",
    "part ways": "diverge",
    "ranks part": "ranks diverge",
    "hungry": "input-bound",
    "ill end": "failure",
    "at hand": "available",
    "fan out": "send",
    "verb": "call, or the method's name",
    "makes steps": "trains",
    "goes on where": "resumes where",
    "go on where": "resume where",
}

# What people type into a search box, and the page that answers: the words stand in one of its headings.
SEARCHES = {
    "install": "get_started",
    "quick start": "get_started",
    "strategy": "strategies",
    "gpu": "gpus",
    "nccl": "gpus",
    "mixed precision": "gpus",
    "xla": "gpus",
    "slurm": "clusters",
    "kubernetes": "clusters",
    "tf_config": "clusters",
    "docker": "clusters",
    "ssh": "clusters",
    "firewall": "clusters",
    "without mpi": "clusters",
    "batch size": "batch_and_learning_rate",
    "learning rate": "batch_and_learning_rate",
    "warm-up": "batch_and_learning_rate",
    "tf.data": "feeding",
    "shuffle": "feeding",
    "generator": "feeding",
    "tfrecord": "feeding",
    "downloads": "feeding",
    "train_step": "custom_steps",
    "contrastive": "custom_steps",
    "callbacks": "callbacks",
    "nan": "callbacks",
    "resume": "resume",
    "preemption": "resume",
    "checkpoint": "resume",
    "save": "saving",
    "export": "saving",
    "hang": "failure",
    "rank hangs": "debugging",
    "oom": "memory",
    "embedding": "memory",
    "slow": "performance",
    "timeout": "failure",
    "error": "failure",
    "debugging": "debugging",
    "breakpoint": "debugging",
    "logging": "logging",
    "out_of_range": "logging",
    "tensorboard": "logging",
    "progress bar": "logging",
    "how many ranks": "performance",
    "quiet": "logging",
    "results differ from one gpu": "faq",
    "debugging a hang": "debugging",
    "slower": "performance",
    "profiling": "performance",
    "throughput": "performance",
    "slow network": "networks",
    "compression": "networks",
    "gradient accumulation": "networks",
    "local sgd": "networks",
    "parameter servers": "parameter_servers",
    "staleness": "parameter_servers",
    "horovod": "migrating_from_horovod",
    "multiworkermirroredstrategy": "migrating_from_tensorflow",
    "custom training loop": "custom_steps",
    "jupyter": "notebooks",
    "notebook": "notebooks",
    "out of memory": "memory",
    "restart": "restarts",
    "fault tolerance": "restarts",
    "multi-node": "clusters",
    "kerastuner": "faq",
    "reproducible": "faq",
    "windows": "faq",
    "environment variables": "command_line",
    "kdist run": "command_line",
    "exact": "limits",
    "glossary": "glossary",
    "sklearn": "callbacks",
    "stuck": "failure",
    "gradienttape": "custom_steps",
    "sbatch": "clusters",
    "8 cores": "performance",
    "earlystopping": "callbacks",
    "conda": "get_started",
    "turn off": "batch_and_learning_rate",
    "not enough slots": "get_started",
    "worse": "faq",
    "early stopping": "callbacks",
    "transfer learning": "faq",
    "fine-tuning": "faq",
    "k-fold": "faq",
    "class_weight": "faq",
    "different results": "faq",
    "multi-gpu": "gpus",
    "torchrun": "migrating_from_pytorch",
    "distributedsampler": "migrating_from_pytorch",
    "syncbatchnorm": "migrating_from_pytorch",
    "fsdp": "migrating_from_pytorch",
    "deepspeed": "migrating_from_pytorch",
    "pytorch": "migrating_from_pytorch",
    "data parallel": "strategies",
    "model parallel": "strategies",
    "infiniband": "clusters",
    "bus error": "clusters",
    "segmentation fault": "failure",
    "address already in use": "failure",
    "memory leak": "memory",
    "lr schedule": "batch_and_learning_rate",
}


def too_long(text):
    """Returns the sentences of a page that have too many words."""
    return [each for each in prose.sentences(text) if len(prose.words(each)) > WORDS_A_SENTENCE]


def too_wide(text):
    """Returns the lines of a page that are too wide; rows of tables cannot be broken."""
    code = [line for _, line in prose.lines_of_code(text) if len(line) > COLUMNS_OF_CODE]
    rest = prose.without_code(text).splitlines()
    return code + [line for line in rest if len(line) > COLUMNS and not line.lstrip().startswith("|")]


def private_words(text):
    """Returns the words of a page that have a meaning in this project only."""
    return private_words_of_plain("\n".join(prose.paragraphs(text)))


def private_words_of_plain(text):
    """Returns those of a text without markup."""
    return [word for word in PRIVATE_WORDS if re.search(rf"\b{word}s?\b", text, re.IGNORECASE)]


def unfound(searches, pages):
    """Returns the searches whose page does not have the words in a heading."""
    return [
        words
        for words, page in searches.items()
        if not any(words in heading.lower() for heading in prose.headings(pages.get(page, "")))
    ]


@pytest.fixture(params=prose.PAGES, scope="module")
def page(request):
    return prose.PAGES[request.param]


def test_sentences_are_short(page):
    assert too_long(page.read_text()) == []


def test_lines_are_narrow(page):
    assert too_wide(page.read_text()) == []


@pytest.fixture(params=prose.OTHER_PAGES, scope="module")
def other_page(request):
    return spmd.ROOT / request.param


def test_lines_of_other_pages_are_narrow(other_page):
    assert too_wide(other_page.read_text()) == []


def test_links_of_other_pages_lead_somewhere(other_page):
    assert unfounded(other_page) == []


def test_words_are_those_of_the_field(page):
    found = private_words(page.read_text())
    assert found == [], {word: PRIVATE_WORDS[word] for word in found}


def unfounded(page):
    """Returns the links of a page that lead nowhere: to no file, to no heading, or to an address that is none."""
    text = page.read_text()
    nowhere = [each for each in prose.local_links(text) if not prose.leads_somewhere(page, each)]
    return nowhere + [each for each in prose.addresses(text) if not prose.is_well_formed(each)]


def test_links_lead_somewhere(page):
    assert unfounded(page) == []


def test_a_page_has_one_title(page):
    found = re.findall(r"^# .+$", prose.without_code(page.read_text()), re.MULTILINE)
    assert len(found) == 1


def test_the_readme_is_short():
    assert len(prose.README.read_text().splitlines()) <= LINES_OF_README


def test_a_search_finds_its_page():
    assert unfound(SEARCHES, {name: path.read_text() for name, path in prose.PAGES.items()}) == []


def test_faults_are_seen():
    long = " ".join(["word"] * (WORDS_A_SENTENCE + 1))
    assert too_long(f"# A\n\nShort. {long.capitalize()}. Short.\n") == [f"{long.capitalize()}."]
    assert too_long(f"| a | {long} |\n|---|---|\n") == [long]
    assert too_long(f"- one\n- {long}\n") == [long]
    assert too_long(f"```\n{long}\n```\n") == []
    assert too_wide(f"{'x' * 121}\n\n| {'x' * 121} |\n\n```python\n{'y' * 89}\n```\n") == ["y" * 89, "x" * 121]
    assert private_words("Adam and its kin. `a wish`") == ["kin"]
    assert unfound({"hang": "a", "nan": "b"}, {"a": "# It hangs\n", "b": "nan\n"}) == ["nan"]
    target = prose.PAGES["index"]
    assert prose.local_links("[a](b.md) [c](https://d.e) ![f](g.svg)\n```\n[x](y)\n```\n") == ["b.md", "g.svg"]
    assert not prose.leads_somewhere(target, "no_such_page.md")
    assert prose.leads_somewhere(target, "faq.md")
    assert not prose.leads_somewhere(target, "faq.md#no-such-heading")
    text = "[a](https://d.e/f) [b](http://d.e) <https://d.e/g> `https://h` https://localhost/i.\n```\nhttps://k\n```\n"
    found = prose.addresses(text)
    assert sorted(found) == ["http://d.e", "https://d.e/f", "https://d.e/g", "https://localhost/i."]
    assert [each for each in found if prose.is_well_formed(each)] == ["https://d.e/f", "https://d.e/g"]
