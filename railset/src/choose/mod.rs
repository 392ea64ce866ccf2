//! Which device, port and GID a rail uses, and why.
//!
//! Every row of every port's GID table is judged; what cannot carry a rail is passed over with a
//! reason. Of the others the first in this order is taken:
//!
//! 1. its address is the one from which the kernel would reach the peer's rail, on the interface
//!    that the route uses;
//! 2. it is on that interface;
//! 3. its address is the route's source, on another interface: the host has the address twice;
//! 4. nothing is known of the route;
//! 5. the route leaves from another RDMA port (two rails in one subnet look like this);
//! 6. the route leaves from something that is no RDMA port: taken only where nothing else is;
//! 7. its port has the peer's own address, so both ends would be one port: the last resort, however
//!    the route looks. A peer on this host is reached so, and so seems one whose address is used
//!    twice, or an end of a cable on this host whose route is lost.
//!
//! Within a group IPv4 link-local addresses come last, then IPv6 where the peer's family is not
//! known, then the lowest port and index. A GID is never taken for its index alone, and an
//! IPv6 link-local one never on Ethernet: the peer could not answer it.

mod error;
mod explain;
mod spec;
mod survey;
mod wish;

use crate::facts::DeviceFacts;
use crate::route::KernelRoute;

pub use error::ChooseError;
pub use explain::{Choice, Explanation, PassedOver, Reason, Routed};
pub use spec::{Address, RailIdentity, RailSpec, Target};
pub(crate) use survey::{Candidate, Survey};
pub use wish::{Asker, Wish, WishError};

/// The best usable GID.
///
/// `target` is the peer's end, where it is known already, and `route` the way that the kernel would
/// send to it.
///
/// # Errors
/// [`ChooseError`] says why there is none, what there is, and which setting to change.
pub fn choose(
    devices: &[DeviceFacts],
    asker: Asker,
    wish: &Wish,
    target: Option<&Target>,
    route: Option<&KernelRoute>,
) -> Result<Choice, ChooseError> {
    let survey = Survey::of(devices, wish, target, route);
    match survey.usable.first() {
        Some(best) => Ok(survey.choice(best, wish)),
        None => Err(survey.error(devices, asker, wish)),
    }
}

#[cfg(test)]
mod tests;
