"""Imported once by the fork server: everything that forked daemons and trainers would otherwise import themselves."""

from __future__ import annotations

import gc

import boto3.crt
import boto3.session
import botocore.httpsession
import pytest  # by the modules of tests, whose functions trainers run
import safetensors.torch
import torch._dynamo  # by the first optimizer
import torch.distributed.checkpoint
from typer.testing import CliRunner

import tierd.cli.app
import tierd.daemon
import tierd.s3.store
import tierd.tiers.directory
from tests.support import trainer

__all__ = ["boto3", "botocore", "pytest", "safetensors", "tierd", "torch", "trainer"]

# Some modules are imported by the first command only.
assert CliRunner().invoke(tierd.cli.app.make_app(), ["version"]).exit_code == 0

# A collection in a child would touch, and so copy, every page that holds an object.
gc.collect()
gc.freeze()
gc.enable()  # tests/support/preloading.py disabled it
