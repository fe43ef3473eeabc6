"""The benchmarks from which every figure in the documentation comes.

Run ``python -m benchmarks --help``. A suite is a module in ``benchmarks/suites``.
"""
