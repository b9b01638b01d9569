"""A bucket as a store: requests, retries, multipart uploads, and what each server supports."""
