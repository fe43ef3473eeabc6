"""The only modules that touch private API of other packages, one per package.

Each use is here because a public call is wrong or several times slower. Each is detected, not
assumed, and has a public fallback that the tests run too (`FALLBACK` in every module).
"""
