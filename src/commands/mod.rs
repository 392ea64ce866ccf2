//! One module per subcommand: its arguments, and `run`.

pub(crate) mod extract;
pub(crate) mod inspect;
pub(crate) mod pack;
pub(crate) mod verify;
