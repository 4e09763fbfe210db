"""An attack from outside, on demand: what is stated against what is true, by brute force.

    python -m scripts.attack [PART ...] --minutes M --seed S

Parts: ``mechanisms``, ``layers``, ``modules``, ``inputs``, ``canaries``, ``kills``, ``ranks`` and
``release``; all of them by default. A case is a function of its seed: cases S, S+1, … run until the
minutes are over, and ``python -m scripts.attack PART --seed X --cases 1`` repeats the one that
failed.
"""
