//! One module per subcommand: its arguments, and `run`.

pub(crate) mod bench;
pub(crate) mod doctor;
pub(crate) mod extract;
pub(crate) mod fetch;
pub(crate) mod inspect;
pub(crate) mod pack;
pub(crate) mod peer;
pub(crate) mod verify;
