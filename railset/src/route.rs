//! Which way the kernel would send to an address: from which of the host's addresses, through which
//! interface.
//!
//! An address stands for no interface: a host may have it twice, on a port's own interface and on a
//! VLAN or macvlan above it, and each of them has a row in the port's GID table. The kernel says
//! which interface a route uses in its answer to `RTM_GETROUTE` (`rtnetlink(7)`). The request and the
//! answer are bytes here; `driver` sends and receives them.

#![allow(
    clippy::host_endian_bytes,
    reason = "netlink messages never leave the machine: their numbers have its byte order"
)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Where packets to an address leave from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelRoute {
    /// The source address that the kernel would take.
    pub source: IpAddr,
    /// The interface that the route uses; `None` where the kernel did not say, or the address is the
    /// host's own.
    pub interface: Option<String>,
}

impl From<IpAddr> for KernelRoute {
    fn from(source: IpAddr) -> Self {
        Self { source, interface: None }
    }
}

/// `RTM_NEWROUTE` and `RTM_GETROUTE`.
const ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `RTA_DST`, `RTA_OIF` and `RTA_PREFSRC`.
const DESTINATION: u16 = 1;
const OUT_INTERFACE: u16 = 4;
const SOURCE: u16 = 7;
/// `RTN_LOCAL`: the destination is an address of this host.
const LOCAL: u8 = 2;
/// `AF_INET` and `AF_INET6` on Linux.
const INET: u8 = 2;
const INET6: u8 = 10;
/// Bytes of `struct nlmsghdr`, `struct rtmsg` and `struct rtattr`.
const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;
const ATTRIBUTE_BYTES: usize = 4;

/// What the kernel's answer says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(not(metrale_rdma_verbs), allow(dead_code, reason = "the driver alone asks the kernel"))]
pub(crate) struct Answer {
    /// The preferred source address.
    pub(crate) source: Option<IpAddr>,
    /// The interface's number.
    pub(crate) interface: Option<u32>,
    /// Whether the destination is the host's own address.
    pub(crate) is_local: bool,
}

/// The request for the route to `to`.
#[cfg_attr(not(metrale_rdma_verbs), allow(dead_code, reason = "the driver alone asks the kernel"))]
pub(crate) fn request(to: IpAddr) -> Vec<u8> {
    let (family, address) = match to {
        IpAddr::V4(v4) => (INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (INET6, v6.octets().to_vec()),
    };
    let attribute_bytes = ATTRIBUTE_BYTES + address.len();
    let bytes = HEADER_BYTES + ROUTE_BYTES + attribute_bytes;
    let mut out = Vec::with_capacity(bytes);
    out.extend((bytes as u32).to_ne_bytes());
    out.extend(GET_ROUTE.to_ne_bytes());
    out.extend(REQUEST.to_ne_bytes());
    out.extend([0; 8]); // Sequence and port number: the socket has one request, ever.
    out.extend([family, (address.len() * 8) as u8]);
    out.resize(HEADER_BYTES + ROUTE_BYTES, 0);
    out.extend((attribute_bytes as u16).to_ne_bytes());
    out.extend(DESTINATION.to_ne_bytes());
    out.extend(address);
    out
}

/// What `bytes`, the kernel's answer, say; `None` where they are no route, as for an address without
/// one.
#[cfg_attr(not(metrale_rdma_verbs), allow(dead_code, reason = "the driver alone asks the kernel"))]
pub(crate) fn answer(bytes: &[u8]) -> Option<Answer> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let body = bytes.get(HEADER_BYTES..length)?;
    let route: &[u8; ROUTE_BYTES] = body.first_chunk()?;
    if kind != ROUTE {
        return None;
    }
    let mut answer = Answer { is_local: route[7] == LOCAL, ..Answer::default() };
    let mut rest = &body[ROUTE_BYTES..];
    while let Some(header) = rest.first_chunk::<ATTRIBUTE_BYTES>() {
        let [length @ .., _, _] = header;
        let length = usize::from(u16::from_ne_bytes(*length));
        let kind = u16::from_ne_bytes([header[2], header[3]]);
        let value = rest.get(ATTRIBUTE_BYTES..length)?;
        match kind {
            OUT_INTERFACE => {
                answer.interface = value.first_chunk().map(|it| u32::from_ne_bytes(*it))
            }
            SOURCE => answer.source = address(value),
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(answer)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(|it| IpAddr::V4(Ipv4Addr::from(it)));
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(|it| IpAddr::V6(Ipv6Addr::from(it)))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ip;

    /// What a kernel answers: `kind`, a route of `route_type`, and these attributes.
    fn message(kind: u16, route_type: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![INET, 32, 0, 0, 254, 0, 0, route_type, 0, 0, 0, 0];
        for (attribute, value) in attributes {
            body.extend(((value.len() + ATTRIBUTE_BYTES) as u16).to_ne_bytes());
            body.extend(attribute.to_ne_bytes());
            body.extend(*value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        let mut bytes = ((HEADER_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn an_answer_has_the_interface_and_the_source_among_other_things() {
        let seven = 7_u32.to_ne_bytes();
        let rest: (u16, &[u8]) = (15, &[1, 2, 3, 4, 5]);
        let attributes = [(DESTINATION, &[10, 1, 0, 2][..]), rest, (OUT_INTERFACE, &seven)];
        let mut attributes = attributes.to_vec();
        attributes.push((SOURCE, &[10, 1, 0, 1]));
        let found = answer(&message(ROUTE, 1, &attributes)).unwrap();
        let source = Some(ip("10.1.0.1"));
        assert_eq!(found, Answer { source, interface: Some(7), is_local: false });
        let v6 = Ipv6Addr::LOCALHOST.octets();
        let found = answer(&message(ROUTE, LOCAL, &[(SOURCE, &v6)])).unwrap();
        assert_eq!(found, Answer { source: Some(ip("::1")), interface: None, is_local: true });
    }

    #[test]
    fn what_is_no_route_or_is_cut_says_nothing() {
        let seven = 7_u32.to_ne_bytes();
        let whole = message(ROUTE, 1, &[(OUT_INTERFACE, &seven)]);
        for length in 0..whole.len() {
            assert_eq!(answer(&whole[..length]), None, "{length} bytes");
        }
        assert_eq!(answer(&message(2, 1, &[(OUT_INTERFACE, &seven)])), None, "an error");
        // An attribute that claims no length, or more than there is, ends the answer.
        for claimed in [0_u16, 3, 200] {
            let mut bytes = whole.clone();
            bytes[HEADER_BYTES + ROUTE_BYTES..][..2].copy_from_slice(&claimed.to_ne_bytes());
            assert_eq!(answer(&bytes), None, "{claimed}");
        }
    }

    #[test]
    fn a_request_names_the_address_and_its_family() {
        let bytes = request(ip("10.1.0.2"));
        assert_eq!(
            (bytes.len(), bytes[16], bytes[17], &bytes[32..]),
            (36, INET, 32, &[10, 1, 0, 2][..])
        );
        let bytes = request(ip("fd00::2"));
        assert_eq!((bytes.len(), bytes[16], bytes[17]), (48, INET6, 128));
    }
}
