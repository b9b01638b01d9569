"""What IAM calls each request that tierd makes. deploy/iam-policy.json allows these actions and no others."""

from __future__ import annotations

NEEDED = {
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_parts": "s3:ListMultipartUploadParts",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}

LOOKED_AT = {
    "get_bucket_lifecycle_configuration": "s3:GetLifecycleConfiguration",
    "get_bucket_versioning": "s3:GetBucketVersioning",
    "get_object_lock_configuration": "s3:GetBucketObjectLockConfiguration",
}
"""Of the bucket, by `tierd doctor` alone: what it may not look at, it says, and goes on."""

ACTIONS = NEEDED | LOOKED_AT
