"""The one table of diagnostic codes: 0xx YAML, 1xx schema, 2xx locations and names, 3xx meaning, 4xx code
generation and drift, 5xx vLLM compatibility, 6xx run time.  Each has a page in ``spec/pages`` and a golden case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Code:
    title: str
    severity: Literal["error", "warning", "info"] = "error"


CODES: dict[str, Code] = {
    # 0xx YAML
    "VT001": Code("the YAML does not parse"),
    "VT002": Code("a bracket in a flow mapping needs quotes"),
    "VT003": Code("duplicate key"),
    "VT004": Code("a key is not a string"),
    "VT005": Code("aliases expand to too much"),
    "VT006": Code("the document is too large or too deep"),
    "VT007": Code("the file cannot be read"),
    "VT008": Code("a YAML tag or a second document"),
    # 1xx schema
    "VT101": Code("unknown key"),
    "VT102": Code("missing key"),
    "VT103": Code("wrong type"),
    "VT104": Code("value not allowed"),
    "VT105": Code("exactly one of several keys"),
    "VT106": Code("unknown version of the language"),
    "VT107": Code("empty where something is needed"),
    # 2xx locations and names
    "VT201": Code("the location does not parse"),
    "VT202": Code("a location names nothing in the model"),
    "VT203": Code("no such op in the forward"),
    "VT204": Code("layer out of range"),
    "VT205": Code("unknown alias"),
    "VT206": Code("no alias table for this architecture"),
    "VT207": Code("the output is a residual pair"),
    "VT208": Code("no such element or input"),
    "VT209": Code("the location is not a tap"),
    "VT210": Code("a name is not defined"),
    "VT211": Code("a name shadows an alias"),
    "VT212": Code("defined and never used", "warning"),
    "VT213": Code("the model is not on this machine"),
    "VT214": Code("the model's configuration cannot be used"),
    "VT215": Code("a sweep path names nothing"),
    "VT216": Code("the op cannot be tapped"),
    "VT217": Code("every module output is not for this verb"),
    "VT218": Code("an arm does not have what another one needs of it"),
    "VT219": Code("arms need each other in a circle"),
    # 3xx meaning
    "VT301": Code("width mismatch"),
    "VT302": Code("heads do not fit"),
    "VT303": Code("dims do not fit"),
    "VT304": Code("a read of an edited location must say what it sees"),
    "VT305": Code("arms disagree in order"),
    "VT306": Code("a vector file cannot be used"),
    "VT307": Code("no such tensor in the file"),
    "VT308": Code("a vector is not finite"),
    "VT309": Code("the text is not one token"),
    "VT310": Code("the rows do not fit what is asked of them"),
    "VT311": Code("a selector selects nothing"),
    "VT312": Code("a prompt file cannot be used"),
    "VT313": Code("duplicate prompt id"),
    "VT314": Code("an override does not fit"),
    "VT316": Code("a prompt does not fit"),
    "VT317": Code("no chat template"),
    "VT318": Code("the sweep does not fit"),
    "VT319": Code("the same edit twice at one place"),
    "VT320": Code("the lens needs the residual stream"),
    "VT321": Code("the reads need more memory than they may take"),
    "VT322": Code("a Python function cannot be used"),
    "VT323": Code("a vector has no direction of its own"),
    "VT324": Code("the bounds do not fit"),
    "VT325": Code("paired prompts differ in length"),
    "VT326": Code("a prompt has no pair"),
    "VT327": Code("the rows cannot be set from there"),
    "VT328": Code("the source has several requests a prompt"),
    "VT329": Code("the vector cannot be taken from the read"),
    # 4xx code generation and drift
    "VT401": Code("the compiled block is out of date"),
    "VT402": Code("an outside file changed since compile"),
    "VT403": Code("there is no compiled block"),
    "VT404": Code("cannot write there"),
    "VT405": Code("the generated block does not verify"),
    # 5xx vLLM
    "VT501": Code("unknown vLLM engine argument"),
    "VT502": Code("vLLM engine argument of the wrong type"),
    "VT503": Code("a vLLM setting that does not go with this engine"),
    "VT504": Code("this vLLM is not known"),
    "VT505": Code("a forward is not the one that was compiled for"),
    # 6xx run time
    "VT601": Code("a worker runs without the block"),
    "VT602": Code("rows fired differ from rows expected"),
    "VT603": Code("a request failed in the worker"),
    "VT604": Code("a read is all zero or not finite", "warning"),
    "VT605": Code("the run folder belongs to something else"),
    "VT606": Code("duplicate live request key"),
    "VT607": Code("the engine did not start"),
    "VT608": Code("a tap does not fire"),
    "VT609": Code("a Python read gave nothing but NaN"),
}
