"""Operations that torch lacks; one file an operation."""
