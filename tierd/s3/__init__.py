"""A bucket as a store: requests, retries, multipart uploads, what each server supports."""
