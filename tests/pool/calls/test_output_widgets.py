"""What the widgets of a rank show, as text, from their messages."""

from __future__ import annotations

from gpupool.core.wire.masking import Secrets
from gpupool.core.wire.output import OutputKind
from gpupool.pool.calls.output import OutputRecorder
from gpupool.pool.calls.output_widgets import Widgets


def opened(name: str, **state: object) -> dict[str, object]:
    state = {"_model_name": f"{name}Model", **state}
    return {"type": "comm_open", "content": {"comm_id": name, "data": {"state": state}}}


def changed(name: str, **state: object) -> dict[str, object]:
    data = {"method": "update", "state": state}
    return {"type": "comm_msg", "content": {"comm_id": name, "data": data}}


def test_a_bar_is_the_text_that_it_has_in_a_terminal() -> None:
    bars = Widgets()
    bars.note(opened("HTML", value="&nbsp;50%"))
    bars.note(opened("FloatProgress", value=0.0, max=5.0))
    children = ["IPY_MODEL_HTML", "IPY_MODEL_FloatProgress", "IPY_MODEL_HTML"]
    bars.note(opened("HBox", children=children))
    assert bars.note(changed("FloatProgress", value=2.5)) == "HBox"  # whose text it changes
    assert bars.text("HBox") == " 50%|█████     | 50%".replace("█████     ", "█" * 5 + " " * 5)
    bars.note({"type": "comm_close", "content": {"comm_id": "HBox"}})
    assert bars.text("HBox") == ""  # leave=False
    assert bars.text("unknown") is None


def test_an_output_collects_what_is_shown_inside_of_it() -> None:
    recorder = OutputRecorder((0,), Secrets())
    displays = recorder.outputs[0].displays
    recorder(0, OutputKind.COMM, opened("Output", outputs=[]))
    recorder(0, OutputKind.DISPLAY, {"data": {"text/plain": "Output()"}, "widget": "Output"})
    recorder(0, OutputKind.COMM, changed("Output", msg_id="call"))
    recorder(0, OutputKind.STDOUT, "inside\n")
    recorder(0, OutputKind.DISPLAY, {"data": {"text/html": "<b>figure</b>"}})
    recorder(0, OutputKind.COMM, changed("Output", msg_id=""))
    recorder(0, OutputKind.STDOUT, "beside\n")
    shown = [{"text/plain": "inside"}, {"text/html": "<b>figure</b>"}]
    assert [bundle["data"] for bundle in displays] == shown
    assert recorder.outputs[0].text == "beside\n"
    for words in ("cleared\n", ""):
        recorder(0, OutputKind.COMM, changed("Output", msg_id="call"))
        recorder(0, OutputKind.CLEAR, {"wait": bool(words)})
        recorder(0, OutputKind.STDOUT, words)
        recorder(0, OutputKind.COMM, changed("Output", msg_id=""))
        text = {"text/plain": words.strip()} if words else {}
        assert [bundle["data"] for bundle in displays] == [text]  # it keeps its place
    assert recorder.outputs[0].text == "beside\n"
