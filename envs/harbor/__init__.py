"""Harbor task directories, read and graded natively."""
