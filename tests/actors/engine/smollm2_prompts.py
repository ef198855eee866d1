"""Prompts as SmolLM2's token ids: engine tests have no tokenizer."""

from __future__ import annotations

# "The cat sat on the mat. The dog sat on the mat."
SENTENCE = (504, 2644, 3343, 335, 260, 6906, 30, 378, 2767, 3343, 335, 260, 6906, 30)

# As the chat template puts them: the default system message, one of the user, and the start of an answer.
SYSTEM = (
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
)
USER, END = (1, 4093, 198), (2, 198, 1, 520, 9531, 198)

# "A farmer has 3 fields with 24 apple trees each. Each tree gives 15 apples. How many apples are there?"
FARMER = (
    49,
    13497,
    553,
    216,
    35,
    3705,
    351,
    216,
    34,
    36,
    11977,
    3417,
    971,
    30,
    3768,
    3187,
    3894,
    216,
    33,
    37,
    13855,
    30,
)
RIDDLE = SYSTEM + USER + FARMER + (1073, 800, 13855, 359, 665, 47) + END

# 'What is the capital of France? Answer as JSON, for example {"capital_of_the_country": "Rome",
# "number_of_inhabitants": 2800000, "continent": "Europe"}'
CAPITAL = (1780, 314, 260, 3575, 282, 4649, 47, 19842, 347, 20110, 28, 327, 1183)
EXAMPLE = (9583, 29721, 79, 1714, 79, 1195, 79, 16664, 1799, 476, 46292, 1002, 476, 7979, 79, 1714, 79, 36124, 269, 917)
VALUES = (1799, 216, 34, 40, 32, 32, 32, 32, 32, 28, 476, 28494, 1799, 476, 14288, 23597)
QUESTION = SYSTEM + USER + CAPITAL + EXAMPLE + VALUES + END
