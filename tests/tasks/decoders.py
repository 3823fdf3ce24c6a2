"""Functions for a limited process in place of decoders: they import no torch."""

import os


def hungry(request, attached):
    return {"problem": str(len(bytearray(2**30)))}


def endless(request, attached):
    while True:
        pass


def crashing(request, attached):
    os.abort()


def short(request, attached):
    return attached[: request["size"]]
