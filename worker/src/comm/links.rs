//! Describes a rank's data links, for comparison with the predicted transport.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use switchyard_worker_contract::{cpu_list::CpuList, event::Link};

/// The memory shared with the other ranks of this host; `None` if there are no others.
pub(super) fn shared_memory(local: &[u32], me: u32) -> Option<Link> {
    let others: Vec<u32> = local.iter().copied().filter(|rank| *rank != me).collect();
    (!others.is_empty()).then(|| Link::SharedMemory { ranks: CpuList::new(others).to_string() })
}

/// A data connection to `rank`; `None` if the socket no longer has addresses.
pub(super) fn tcp(rank: u32, socket: &OwnedFd) -> Option<Link> {
    let local = SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    let remote = SocketAddr::try_from(rustix::net::getpeername(socket).ok()??).ok()?;
    let interface = interface(local.ip(), remote.ip());
    Some(Link::Tcp { rank, local: local.to_string(), remote: remote.to_string(), interface })
}

/// The interface on which the kernel sends to an address.
fn interface(local: IpAddr, remote: IpAddr) -> Option<String> {
    if remote.is_loopback() || local == remote {
        return Some("lo".to_owned());
    }
    let IpAddr::V4(remote) = remote else { return None };
    route(&std::fs::read_to_string("/proc/net/route").ok()?, remote.into())
}

/// The interface of the longest matching prefix, from the text of `/proc/net/route`. That file
/// prints addresses in network byte order as native integers.
fn route(table: &str, address: u32) -> Option<String> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(|raw| u32::from_be_bytes(raw.to_ne_bytes()));
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (destination, mask) = (number(fields.get(1)?)?, number(fields.get(7)?)?);
        (address & mask == destination).then(|| (mask, fields[0].to_owned()))
    };
    table.lines().skip(1).filter_map(row).max_by_key(|(mask, _)| *mask).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    #[test]
    #[cfg(target_endian = "little")]
    fn the_longest_prefix_wins() {
        let table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
                     eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\n\
                     net1\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\nbroken\tx\n";
        let to = |address: [u8; 4]| route(table, Ipv4Addr::from(address).into());
        assert_eq!(to([192, 168, 7, 1]).as_deref(), Some("net1"));
        assert_eq!(to([8, 8, 8, 8]).as_deref(), Some("eth0"));
        assert_eq!(route("Iface\n", 1), None);
    }

    #[test]
    fn a_connection_names_both_ends() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (local, remote) = (stream.local_addr().unwrap().to_string(), stream.peer_addr().unwrap().to_string());
        let link = tcp(3, &OwnedFd::from(stream)).unwrap();
        assert_eq!(link, Link::Tcp { rank: 3, local, remote, interface: Some("lo".into()) });
    }

    #[test]
    fn a_rank_alone_on_its_host_shares_no_memory() {
        assert_eq!(shared_memory(&[4], 4), None);
        assert_eq!(shared_memory(&[2, 4, 5], 4), Some(Link::SharedMemory { ranks: "2,5".into() }));
    }
}
