"""Parts that join the core through its open families, and are imported when they are asked for.

The rooms of the core never import this one. Their packages show its names on demand
(``dptrain.accounting.compose_runs``), and the registries make its members when they are first read,
so that whoever uses dptrain need not know where something lives.

- ``accountants``: any strategy matrix under b-min-sep, several picks in random allocation, and
  mechanisms in the terms of the library dp_accounting
- ``individual``: a privacy budget for every example, and its accounting
- ``selection``: several runs on the same data, and the best of them
"""
