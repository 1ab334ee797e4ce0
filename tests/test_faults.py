"""What goes wrong on purpose is caught by the program: in time, on every process, with a message that names it."""

import pytest

from tests import cluster
from tests.equality import assert_same_tokens

pytestmark = pytest.mark.e2e

DEADLINE_S = 4
START = {"control.deadline_s": float(DEADLINE_S), "control.heartbeat_s": 0.5, "debug.hash_chain": True, "top_logits": 2,
         "decode.steps": 1, "decode.slots": 2, "reads": [], "prefill.batch": 1}
TWO_PREFILL = START | {"prefill.engines": 2, "decode.engines": 1}
TWO_DECODE = START | {"prefill.engines": 1, "decode.engines": 2}


def requests(count, tokens=40):
    """Prompts of one chunk and tokens enough that decoding goes on while others are prefilled."""
    return [{"prompt": [1, *range(10 + i, 40 + i)], "max_tokens": tokens, "temperature": 0, "ignore_eos": True} for i in range(count)]


def run(folder, config, *, processes, faults, asked=None, seconds=180):
    case = {"name": "case", "config": config, "requests": asked or requests(12), "faults": faults}
    with cluster.job(folder, [case], processes=processes, devices=1) as job:
        codes = job.wait(seconds)
        return codes, job.text(lines=60)


@pytest.fixture(scope="module")
def solo(tmp_path_factory):
    """The right answers, of interleaved engines without faults."""
    folder = tmp_path_factory.mktemp("solo")
    codes, text = run(folder, START | {"mode": "interleaved"}, processes=1, faults=[])
    assert codes == [0], text
    return cluster.answers(folder, "case")


def check(folder, solo, *, at_least, error):
    """At least so many answers are right, none is wrong, and the others are errors that contain `error`."""
    answers = cluster.answers(folder, "case")
    assert len(answers) == len(solo)
    good = [a for a in answers if "error" not in a]
    for answer in good:
        assert_same_tokens(solo[answer["index"]], answer, f"request {answer['index']}")
    for answer in answers:
        assert "error" not in answer or error in answer["error"]["message"], answer
    assert at_least <= len(good) < len(solo), [a.get("error") for a in answers]
    assert error in cluster.end(folder, "case")


def test_killed_sender(tmp_path, solo):
    """A killed prefill process fails the requests that needed it; the others' tokens stay right, on both decode slots."""
    codes, text = run(tmp_path, TWO_PREFILL, processes=3, faults=[["kill", 1, "send", 3]])
    assert codes[1] == -9 and codes[0] == codes[2] == 1, (codes, text)
    check(tmp_path, solo, at_least=8, error="transfer")


def test_killed_receiver(tmp_path, solo):
    """A killed decode process is noticed by its silence; its requests end with an error that says so, the others go on."""
    codes, text = run(tmp_path, TWO_DECODE, processes=3, faults=[["kill_at_write", 2, 6]])
    assert codes[2] == -9 and codes[0] == codes[1] == 1, (codes, text)
    check(tmp_path, solo, at_least=6, error="process 2 was silent")


def test_stopped_sender(tmp_path, solo):
    """A process stopped past the deadline and continued later is out: late data reaches no slot, it leaves by itself."""
    codes, text = run(tmp_path, TWO_PREFILL, processes=3, faults=[["stop", 1, "send", 3, 3 * DEADLINE_S]])
    assert codes[0] == codes[2] == 1 and codes[1] != 0, (codes, text)
    check(tmp_path, solo, at_least=8, error="process 1 was silent")


def test_skipped_send(tmp_path, solo):
    """A process that does not issue a transfer is named before any token is made from wrong data."""
    codes, text = run(tmp_path, START, processes=2, faults=[["skip", 0, "send", 5]])
    assert all(codes), text
    check(tmp_path, solo, at_least=0, error="")
    assert "out of step" in text or "processes 0 and 1 diverged at plan" in text, text


def test_skipped_receive(tmp_path, solo):
    codes, text = run(tmp_path, START, processes=2, faults=[["skip", 1, "receive", 5]])
    assert all(codes), text
    check(tmp_path, solo, at_least=0, error="")
    assert "out of step" in text or "diverged" in text, text


def test_skipping_bystander(tmp_path, solo):
    """A process outside a transfer that does not issue it is named as well: its count is off from then on."""
    codes, text = run(tmp_path, TWO_PREFILL, processes=3, faults=[["skip", 1, "pass", 3]])
    assert all(codes), text
    check(tmp_path, solo, at_least=0, error="")
    assert "process 1 diverged from the others at plan" in text or "out of step" in text, text


def test_swapped_request(tmp_path, solo):
    """A chunk of another request in a transfer's place is refused by its ticket."""
    codes, text = run(tmp_path, START, processes=2, faults=[["swap", 0, 5]])
    assert all(codes), text
    check(tmp_path, solo, at_least=0, error="out of step")


@pytest.mark.parametrize("fault", [["exchange", 0, 5], ["extra", 0, 5, "a chunk"], ["extra", 0, 5, "a number"]],
                         ids=["a swapped pair", "an extra chunk", "an extra number"])
def test_another_order_of_transfers(tmp_path, solo, fault):
    """Transfers in another order than the log's, or besides it: the cell ends before any token is made from wrong data."""
    codes, text = run(tmp_path, START, processes=2, faults=[fault])
    assert all(codes), text
    check(tmp_path, solo, at_least=0, error="transfer")


@pytest.mark.parametrize("batch,hit", [(1, [4]), (2, [8, 9])], ids=["of one request", "of two requests"])
def test_corrupt_chunk(tmp_path, solo, batch, hit):
    """A number that changes on the way ends the requests of its chunk, and no other one."""
    codes, text = run(tmp_path, START | {"prefill.batch": batch}, processes=2, faults=[["gather", 0, 12], ["corrupt", 0, 5]])
    assert codes == [0, 0], text
    answers = cluster.answers(tmp_path, "case")
    assert [a["index"] for a in answers if "error" in a] == hit
    assert all("its checksum is" in answers[i]["error"]["message"] for i in hit)
    for answer in answers:
        if "error" not in answer:
            assert_same_tokens(solo[answer["index"]], answer)


def test_cancelled_with_half_of_its_chunks_there(tmp_path, solo):
    """The rest arrives for nobody: the slot's next request and all others have their right tokens."""
    long = {"prompt": [1, *range(10, 137)], "max_tokens": 4, "temperature": 0}
    small = START | {"chunk": 16, "buckets": [16], "prefill.ahead": 4}
    codes, text = run(tmp_path, small, processes=2, faults=[["cancel_at_arrival", 0, 0, 4]], asked=[long, *requests(12)])
    assert codes == [0, 0], text
    first, *rest = cluster.answers(tmp_path, "case")
    assert first["error"]["message"] == "cancelled with 4 chunks there"
    for alone, answer in zip(solo, rest, strict=True):
        assert_same_tokens(alone, answer)


def test_no_free_slot_for_long(tmp_path, solo):
    """Requests wait for the only slot for longer than the deadline: nobody is taken for dead, nothing is lost."""
    config = START | {"decode.slots": 1, "control.deadline_s": 1.5, "control.heartbeat_s": 0.2}
    codes, text = run(tmp_path, config, processes=2, faults=[["slow_decode", 1, 0.05]], asked=requests(3))
    assert codes == [0, 0], text
    for alone, answer in zip(solo, cluster.answers(tmp_path, "case")):
        assert_same_tokens(alone, answer)


def test_slow_engines_get_less_work(tmp_path, solo):
    """Of two prefill engines, then of two decode engines, one takes ten times as long: all answers are right, the other does most."""
    config = TWO_PREFILL | {"decode.engines": 2}
    cases = [{"name": "prefill", "config": config | {"decode.slots": 8}, "requests": requests(12, tokens=2) * 4, "faults": [["slow_prefill", 0, 0.1]]},
             {"name": "decode", "config": config, "requests": requests(12) * 3, "faults": [["slow_decode", 2, 0.05]]}]
    with cluster.job(tmp_path, cases, processes=4, devices=1) as job:
        codes = job.wait(180)
        log = job.text(0, lines=5000)
    assert codes == [0] * 4, log
    for name in ("prefill", "decode"):
        for answer in cluster.answers(tmp_path, name):
            alone, made = solo[answer["index"] % 12], len(answer["token_ids"])
            assert_same_tokens(alone | {key: alone[key][:made] for key in ("token_ids", "top_logits")}, answer)
    prefill, decode = log.split("compiled, and")[1:]
    for part, what in ((prefill, "prefill on prefill"), (decode, "insert on decode")):
        slow, fast = (part.count(f"{what} {i} ") for i in range(2))
        assert 1 <= slow <= 0.7 * fast, (what, slow, fast)


def test_shifted_kv_is_not_equal(tmp_path, solo):
    """An off-by-one in the KV's position turns the comparison red."""
    codes, text = run(tmp_path, START, processes=2, faults=[["shift_kv", None, 1]])
    assert codes == [0, 0], text
    wrong = 0
    for reference, answer in zip(solo, cluster.answers(tmp_path, "case"), strict=True):
        try:
            assert_same_tokens(reference, answer)
        except AssertionError:
            wrong += 1
    assert wrong > len(solo) / 2
