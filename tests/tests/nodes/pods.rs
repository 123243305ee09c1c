//! The network as pods see it: each other, Services, DNS names, link speeds; and leftovers of the
//! cluster.

use crate::nodes::{apply, cluster, inside, kubectl, pod, until, wait_phase};
use anyhow::{Context, Result};
use serde_json::json;
use switchyard_tests::nodes::{Nodes, leftovers_of};

/// Machine-wide settings that a kubelet overwrites.
fn machine_settings() -> Vec<String> {
    let files = ["vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward"];
    files.iter().map(|file| format!("{file} {:?}", std::fs::read_to_string(format!("/proc/sys/{file}")))).collect()
}

#[test]
fn pods_on_real_nodes() -> Result<()> {
    let settings = machine_settings();
    let mut nodes = cluster(3)?;
    assert_eq!(machine_settings(), settings);
    let number = nodes.number();
    for (index, node) in nodes.names().iter().enumerate() {
        let script = format!(
            "echo started {index}; mkdir /tmp/www; echo page {index} > /tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
        );
        apply(&nodes, &pod(&format!("web-{index}"), Some(node), &script))?;
    }
    for index in 0..3 {
        wait_phase(&nodes, &format!("web-{index}"), "Running")?;
    }
    logs_come_from_the_kubelet(&nodes)?;
    pods_reach_each_other_and_services(&nodes)?;
    a_link_has_the_configured_speed(&nodes)?;
    racks_have_the_configured_speeds(&nodes)?;
    a_node_can_be_unplugged(&nodes)?;
    pods_outlive_their_nodes_programs(&mut nodes)?;

    // Everything that must be gone afterwards exists now: processes, the interface, routes,
    // cgroups, files.
    let there = leftovers_of(number)?;
    for kind in ["process ", "interface ", "route ", "cgroup ", "file "] {
        assert!(there.iter().any(|entry| entry.starts_with(kind)), "no {kind}in {there:#?}");
    }
    drop(nodes);
    assert_eq!(leftovers_of(number)?, Vec::<String>::new());
    Ok(())
}

fn logs_come_from_the_kubelet(nodes: &Nodes) -> Result<()> {
    for index in 0..3 {
        let name = format!("web-{index}");
        until("a log", || Ok(kubectl(nodes, &["logs", &name])? == format!("started {index}\n")))?;
    }
    Ok(())
}

fn address(nodes: &Nodes, pod: &str) -> Result<String> {
    kubectl(nodes, &["get", "pod", pod, "-o", "jsonpath={.status.podIP}"])
}

fn pods_reach_each_other_and_services(nodes: &Nodes) -> Result<()> {
    let page = |from: &str, host: &str| inside(nodes, from, &format!("timeout 10 wget -qO- http://{host}/"));
    let other = address(nodes, "web-1")?;
    assert_eq!(page("web-0", &format!("{other}:8080"))?, "page 1\n", "to a pod of another node");
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
        "selector": {"app": "web-1"}, "ports": [{"port": 80, "targetPort": 8080}],
    }});
    apply(nodes, &service)?;
    let cluster_address = kubectl(nodes, &["get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"])?;
    // From another node, and from the serving pod itself.
    for from in ["web-0", "web-1"] {
        until("answered", || Ok(page(from, &cluster_address).is_ok_and(|page| page == "page 1\n")))?;
        for name in ["web", "web.default.svc.cluster.local"] {
            assert_eq!(page(from, name)?, "page 1\n", "{name} from {from}");
        }
    }
    assert!(page("web-0", "nobody.default.svc.cluster.local").is_err(), "a name that is not there");
    Ok(())
}

/// Throughput from one pod to another in Mbit/s, measured by the sender.
fn megabits(nodes: &Nodes, from: &str, to: &str, mebibytes: u32) -> Result<f64> {
    let destination = address(nodes, to)?;
    // The receiver replies once it has everything, so the sender measures the time of the bytes on
    // the link.
    let receiver = "nc -l -p 5000 -e sh -c 'head -c $((SIZE * 1048576)) | wc -c'";
    inside(nodes, to, &format!("SIZE={mebibytes}; export SIZE; ({receiver}) > /dev/null 2>&1 &"))?;
    let script = format!(
        "start=$(cut -d' ' -f1 /proc/uptime)\n\
         until [ \"$got\" = {} ]; do got=$(head -c {mebibytes}m /dev/zero | nc -w 30 {destination} 5000); done\n\
         echo $start $(cut -d' ' -f1 /proc/uptime)",
        mebibytes * 1_048_576
    );
    let times: Vec<f64> =
        inside(nodes, from, &script)?.split_whitespace().filter_map(|time| time.parse().ok()).collect();
    let [start, end] = times[..] else { anyhow::bail!("no two times: {times:?}") };
    Ok(f64::from(mebibytes) * 8.388_608 / (end - start))
}

/// MiB that a node has sent over its limited links.
fn limited_mebibytes(nodes: &Nodes, node: &str) -> Result<u64> {
    let text = nodes.run(node, "tc", &["-s", "class", "show", "dev", "eth0"])?.stdout;
    let sent = text.lines().filter_map(|line| line.trim().strip_prefix("Sent ")?.split_once(' '));
    let bytes: u64 = sent.map(|(bytes, _)| bytes.parse::<u64>()).sum::<Result<_, _>>()?;
    Ok(bytes >> 20)
}

/// A limit is an upper bound on a machine of any speed. Counters show which transfers have one.
fn a_link_has_the_configured_speed(nodes: &Nodes) -> Result<()> {
    let names = nodes.names();
    nodes.set_speed(&names[0], &names[1], Some(50_000_000))?;
    let rate = |from: &str, to: &str| megabits(nodes, from, to, 16).with_context(|| format!("{from} to {to}"));
    let (there, back) = (rate("web-0", "web-1")?, rate("web-1", "web-0")?);
    let limited = limited_mebibytes(nodes, &names[0])?;
    let aside = rate("web-0", "web-2")?;
    let after = limited_mebibytes(nodes, &names[0])?;
    assert!(limited >= 16 && after == limited, "{limited} MiB to node-2, {after} MiB after 16 MiB to node-3");
    nodes.set_speed(&names[0], &names[1], None)?;
    let free = rate("web-0", "web-1")?;
    assert_eq!(limited_mebibytes(nodes, &names[0])?, 0, "the limit is gone");
    println!("50 Mbit/s: {there:.0} there, {back:.0} back, {aside:.0} to another node, {free:.0} without the limit");
    // Headers reduce it, and the queue's burst of 256 kB can pass at once.
    assert!(there < 53.0 && back < 53.0, "{there} and {back} Mbit/s over a link of 50");
    assert!(
        nodes.set_speed(&names[0], &names[0], None).is_err() && nodes.set_speed("node-9", &names[0], None).is_err()
    );
    Ok(())
}

/// Two nodes in one rack and one in another, with a slow link between the racks.
fn racks_have_the_configured_speeds(nodes: &Nodes) -> Result<()> {
    let names = nodes.names();
    let racks = [vec![names[0].clone(), names[1].clone()], vec![names[2].clone()]];
    nodes.set_racks(&racks, 400_000_000, 50_000_000)?;
    // Rate, and whether most of the bytes left the rack.
    let send = |from: &str, to: &str| -> Result<(f64, bool)> {
        let before = nodes.bytes_between_racks()?;
        let rate = megabits(nodes, from, to, 16).with_context(|| format!("{from} to {to}"))?;
        Ok((rate, nodes.bytes_between_racks()? - before > 8 << 20))
    };
    let (inside, there, back) = (send("web-0", "web-1")?, send("web-0", "web-2")?, send("web-2", "web-1")?);
    println!("racks: {:.0} Mbit/s inside, {:.0} out, {:.0} in", inside.0, there.0, back.0);
    assert!(inside.0 < 424.0 && there.0 < 53.0 && back.0 < 53.0, "set were 400 and 50");
    assert_eq!([inside.1, there.1, back.1], [false, true, true], "bytes between racks");
    // A moved node must get the speeds of its new rack.
    let racks = [vec![names[0].clone(), names[2].clone()], vec![names[1].clone()]];
    nodes.set_racks(&racks, 400_000_000, 50_000_000)?;
    let (moved, departed) = (send("web-0", "web-2")?, send("web-0", "web-1")?);
    assert!(departed.0 < 53.0, "{} Mbit/s to the departed node", departed.0);
    assert_eq!([moved.1, departed.1], [false, true], "bytes between racks after the move");
    assert!(nodes.set_racks(&racks[..1], 1_000_000, 1_000_000).is_err(), "a node in no rack");
    Ok(())
}

fn a_node_can_be_unplugged(nodes: &Nodes) -> Result<()> {
    let (node, other) = ("node-3", address(nodes, "web-2")?);
    let reached = || inside(nodes, "web-0", &format!("timeout 2 wget -qO- http://{other}:8080/"));
    nodes.set_link(node, false)?;
    assert!(reached().is_err(), "without a link");
    nodes.set_link(node, true)?;
    until("reachable again", || Ok(reached().is_ok_and(|page| page == "page 2\n")))
}

fn pods_outlive_their_nodes_programs(nodes: &mut Nodes) -> Result<()> {
    let started = |nodes: &Nodes| {
        kubectl(
            nodes,
            &["get", "pod", "web-1", "-o", "jsonpath={.status.containerStatuses[0].state.running.startedAt}"],
        )
    };
    let before = started(nodes)?;
    nodes.restart_containerd("node-2")?;
    until("answering after containerd", || Ok(inside(nodes, "web-1", "echo yes").is_ok_and(|reply| reply == "yes\n")))?;
    nodes.kill_kubelet("node-2")?;
    assert!(inside(nodes, "web-1", "echo yes").is_err(), "exec works without a kubelet");
    nodes.start_kubelet("node-2")?;
    until(
        "answering after the kubelet",
        || Ok(inside(nodes, "web-1", "echo yes").is_ok_and(|reply| reply == "yes\n")),
    )?;
    assert_eq!(started(nodes)?, before, "the container restarted");
    Ok(())
}
