//! The names and addresses of this machine.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use crate::failure::Failure;

/// An address of a documentation network: nothing is sent to it.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// The host name, or a placeholder.
pub(crate) fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().trim().to_owned();
    if name.is_empty() { "this machine".to_owned() } else { name }
}

/// The address of the network interface `name`, IPv4 if it has one.
///
/// # Errors
/// An interface that is not there or has no address, with those that are.
pub(crate) fn address_of(name: &str) -> Result<IpAddr, Failure> {
    let all = if_addrs::get_if_addrs()
        .map_err(|source| Failure::System { what: "list the network interfaces".to_owned(), source })?;
    let mut of = all.iter().filter(|interface| interface.name == name).map(if_addrs::Interface::ip);
    let usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let found = of.clone().find(IpAddr::is_ipv4).or_else(|| of.find(usable));
    found.ok_or_else(|| {
        let names: BTreeSet<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
        let names: Vec<&str> = names.into_iter().collect();
        Failure::Argument(format!(
            "--interface {name}: there is no such network interface with an address; there are {}",
            names.join(", ")
        ))
    })
}

/// Where other machines reach a server of this one that listens on `address`: the address itself, or for one that listens
/// everywhere the address from which this machine reaches others.
pub(crate) fn reachable_from_outside(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    let outgoing = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect(ELSEWHERE)?;
        socket.local_addr()
    });
    let ip = outgoing.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |found| found.ip());
    SocketAddr::new(ip, address.port())
}

/// The names by which others may call this machine: its host name and every address.
pub(crate) fn own_names() -> BTreeSet<String> {
    let addresses = if_addrs::get_if_addrs().unwrap_or_default();
    let addresses = addresses.into_iter().map(|interface| interface.ip().to_string());
    let fixed = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    addresses.chain(fixed).chain([host_name()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_has_its_address_and_another_name_is_refused_with_those_that_are_there() {
        assert_eq!(address_of("lo").unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        let error = address_of("ib7").unwrap_err().to_string();
        assert!(error.contains("--interface ib7") && error.contains("lo"), "{error}");
    }

    #[test]
    fn a_server_that_listens_everywhere_is_reached_at_an_address_of_this_machine() {
        let fixed: SocketAddr = "10.1.2.3:4".parse().unwrap();
        assert_eq!(reachable_from_outside(fixed), fixed);
        let found = reachable_from_outside("0.0.0.0:5".parse().unwrap());
        assert!(!found.ip().is_unspecified() && found.port() == 5, "{found}");
        assert!(own_names().contains(&found.ip().to_string()) && own_names().contains("localhost"));
    }
}
