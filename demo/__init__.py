"""A real S3 server and real photographs for `make demo` and the tests; not in the wheel."""
