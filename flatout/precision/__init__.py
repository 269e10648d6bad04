"""Number formats: autocast, loss scaling, the precision of fp32 matmul."""
