//! The addresses that a reward may connect to.
//!
//! Invariant: addresses of the metadata services of clouds, which hand out credentials, must be listed as addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Hosts, addresses and networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowList {
    hosts: Vec<String>,
    networks: Vec<AddressRange>,
}

/// Addresses with the same first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressRange {
    address: IpAddr,
    bits: u8,
}

impl AllowList {
    /// The host of the URL alone, or the entries of a recipe: names, addresses, and networks such as `10.0.0.0/8`.
    ///
    /// # Errors
    /// An entry that is none of these, or a list that can never allow `host` itself; the text ends a sentence.
    pub fn new(host: &str, entries: Option<&[String]>) -> Result<Self, String> {
        let mut list = Self { hosts: Vec::new(), networks: Vec::new() };
        match entries {
            None => list.hosts.push(host.to_lowercase()),
            Some(entries) => entries.iter().try_for_each(|entry| list.add(entry))?,
        }
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        match bare.parse() {
            Ok(address) => list.check(host, address)?,
            Err(_) if list.networks.is_empty() && !list.has_host(host) => {
                return Err(format!("does not hold `{host}`, the host of `url`; add it"));
            }
            Err(_) => {}
        }
        Ok(list)
    }

    fn add(&mut self, entry: &str) -> Result<(), String> {
        let (address, bits) = match entry.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (entry, None),
        };
        let wrong = || format!("holds `{entry}`, which is no host, address or network such as `10.0.0.0/8`");
        if let Ok(address) = address.trim_matches(['[', ']']).parse::<IpAddr>() {
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.map_or(Ok(most), str::parse).map_err(|_| wrong())?;
            if bits > most {
                return Err(wrong());
            }
            self.networks.push(AddressRange { address, bits });
            return Ok(());
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if bits.is_some() || entry.is_empty() || !entry.chars().all(plain) {
            return Err(wrong());
        }
        self.hosts.push(entry.to_lowercase());
        Ok(())
    }

    fn has_host(&self, host: &str) -> bool {
        self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(host))
    }

    /// Whether connections to `address`, which `host` resolved to, are allowed.
    ///
    /// # Errors
    /// The reason why they are not.
    pub fn check(&self, host: &str, address: IpAddr) -> Result<(), String> {
        let meant = embedded(address);
        if self.networks.iter().any(|network| network.holds(address) || network.holds(meant)) {
            return Ok(());
        }
        if must_be_listed(meant) {
            return Err(format!(
                "`{host}` leads to {address}, an address that is local to a link or to a cloud machine; list it in `allow` if \
                 that is intended"
            ));
        }
        if self.has_host(host) {
            return Ok(());
        }
        Err(format!("`{host}` leads to {address}, which is not in `allow`"))
    }
}

impl AddressRange {
    fn holds(self, address: IpAddr) -> bool {
        let (own, other, width) = match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (u128::from(own.to_bits()), u128::from(other.to_bits()), 32)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits(), other.to_bits(), 128),
            _ => return false,
        };
        // A shift by the whole width leaves nothing to compare.
        let shift = u32::from(width - self.bits);
        own.checked_shr(shift).unwrap_or(0) == other.checked_shr(shift).unwrap_or(0)
    }
}

/// The IPv4 address that is mapped or translated into an IPv6 address; else the same address.
fn embedded(address: IpAddr) -> IpAddr {
    let IpAddr::V6(six) = address else { return address };
    let [a, b, c, d, e, f, g, h] = six.segments();
    let four = |high: u16, low: u16| IpAddr::V4(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)));
    match (a, b, c, d, e, f) {
        (0x64, 0xff9b, 0, 0, 0, 0) => four(g, h),
        (0x2002, high, low, ..) => four(high, low),
        _ => address.to_canonical(),
    }
}

/// Addresses that must be listed: link-local, multicast, unspecified, and metadata services of clouds.
fn must_be_listed(address: IpAddr) -> bool {
    const ALIBABA: Ipv4Addr = Ipv4Addr::new(100, 100, 100, 200);
    const AZURE: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);
    const ORACLE: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 192);
    const AMAZON: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    match address {
        IpAddr::V4(four) => {
            four.is_link_local()
                || four.is_unspecified()
                || four.is_multicast()
                || four.is_broadcast()
                || [ALIBABA, AZURE, ORACLE].contains(&four)
        }
        IpAddr::V6(six) => {
            six.is_unicast_link_local() || six.is_unspecified() || six.is_multicast() || six == AMAZON
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(host: &str, entries: &[&str]) -> Result<AllowList, String> {
        AllowList::new(host, Some(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>()))
    }

    fn may(list: &AllowList, host: &str, address: &str) -> bool {
        list.check(host, address.parse().unwrap()).is_ok()
    }

    #[test]
    fn without_a_list_the_host_may_lead_anywhere_but_to_addresses_that_must_be_listed() {
        let own = AllowList::new("rm.example", None).unwrap();
        for address in ["127.0.0.1", "10.1.2.3", "8.8.8.8", "::1", "2001:db8::1"] {
            assert!(may(&own, "RM.example", address), "{address}");
            assert!(!may(&own, "other.example", address), "{address}");
        }
        for address in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "fe80::1",
            "fd00:ec2::254",
            "100.100.100.200",
            "168.63.129.16",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "255.255.255.255",
        ] {
            assert!(!may(&own, "rm.example", address), "{address}");
        }
    }

    #[test]
    fn networks_allow_by_address() {
        let inner = list("rm.example", &["10.0.0.0/8", "fd12::/16", "169.254.1.1"]).unwrap();
        for (address, allowed) in [
            ("10.255.0.1", true),
            ("11.0.0.1", false),
            ("fd12:3::1", true),
            ("fd13::1", false),
            ("169.254.1.1", true),
            ("169.254.1.2", false),
            ("::ffff:10.0.0.1", true),
        ] {
            assert_eq!(may(&inner, "rm.example", address), allowed, "{address}");
        }
        assert!(may(&list("x", &["0.0.0.0/0"]).unwrap(), "x", "169.254.169.254"));
    }

    #[test]
    fn invalid_lists_are_refused() {
        for (host, entries) in [
            ("rm", &["http://rm"][..]),
            ("rm", &["10.0.0.0/33"]),
            ("rm", &["rm/8"]),
            ("rm", &[""]),
            ("rm", &["other"]),
            ("rm", &[]),
            ("169.254.169.254", &["rm"]),
            ("[fe80::1]", &["10.0.0.0/8"]),
        ] {
            assert!(list(host, entries).is_err(), "{host} {entries:?}");
        }
        assert!(AllowList::new("169.254.169.254", None).is_err());
        assert!(list("169.254.169.254", &["169.254.169.254"]).is_ok());
    }

    proptest! {
        #[test]
        fn a_network_holds_exactly_what_shares_its_first_bits(a in any::<u32>(), b in any::<u32>(), bits in 0u8..=32) {
            let network = AddressRange { address: Ipv4Addr::from_bits(a).into(), bits };
            let same = (a ^ b).leading_zeros() >= u32::from(bits);
            prop_assert_eq!(network.holds(Ipv4Addr::from_bits(b).into()), same);
        }
    }
}
