"""Stand-alone programs that run the sparse variational GPs of other libraries, each in an
environment of its own.
"""
