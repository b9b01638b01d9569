"""Imported once by the fork server: everything that forked daemons and trainers would otherwise import themselves."""

from __future__ import annotations

import gc

import boto3.crt
import boto3.session
import botocore.httpsession
import botocore.session
import numpy  # by the program that examines checkpoints
import pytest  # by the modules of tests, whose functions trainers run
import safetensors.torch
import torch._dynamo  # by the first optimizer
import torch.distributed.checkpoint
from typer.testing import CliRunner

import tierd.cli.app
import tierd.daemon
import tierd.s3.client
import tierd.s3.store
import tierd.tiers.directory
from tests.support import trainer

__all__ = ["boto3", "botocore", "numpy", "pytest", "safetensors", "tierd", "torch", "trainer"]

# Some modules are imported by the first command only.
assert CliRunner().invoke(tierd.cli.app.make_app(), ["version"]).exit_code == 0

# The first client of a process reads the models of S3, which takes 0.1 s.
session = botocore.session.Session()
session.register_component("data_loader", tierd.s3.client._MODELS)
session.create_client("s3", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none").close()

# A collection in a child would touch, and so copy, every page that holds an object.
gc.collect()
gc.freeze()
gc.enable()  # tests/support/preloading.py disabled it
