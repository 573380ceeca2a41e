"""English words that say little about the subject of a text: articles, pronouns, prepositions and the like."""

from __future__ import annotations

_LINES = (
    "a an the this that these those such same other another each every either neither both all any some no none",
    "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself",
    "we us our ours ourselves they them their theirs themselves one ones who whom whose which what whatever whoever",
    "someone something somebody anyone anything anybody everyone everything everybody nobody nothing",
    "and or but nor so yet if unless because since although though while whereas whether than as until",
    "of in on at by for with without within from to into onto upon over under above below between among through",
    "during before after against about around across along behind beside besides beyond toward towards via per off",
    "out up down near am is are was were be been being have has had having do does did doing done",
    "can could may might must shall should will would ought not never only just also too very more most much many",
    "few fewer less least little quite rather almost here there where when why how then now again once ever always",
    "often sometimes still already thus hence therefore however moreover otherwise else instead perhaps",
    "don doesn didn isn aren wasn weren hasn haven hadn won wouldn couldn shouldn cannot ain ll ve re",
)
ENGLISH = frozenset(word for line in _LINES for word in line.split())
