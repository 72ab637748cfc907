"""The application's Session, the handler's Session, and support for AsyncSession."""
