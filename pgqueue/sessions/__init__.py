"""The application's Session, the handler's, and the door for AsyncSession."""
