"""The planner: which strategy runs, and where, from what was measured and what the user wishes.

:mod:`conditions` is what is known, :mod:`plans` what there is to choose among, :mod:`agreement` what each
plan spends a token, :mod:`cost` what it would take, :mod:`choose` which one and why. :mod:`measure` and
:mod:`probe` measure, over a transport that they are given; :mod:`planner` learns from picture to picture,
and :mod:`drive` makes one. No torch, no files, no sockets.
"""
