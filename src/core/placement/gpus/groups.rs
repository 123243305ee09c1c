//! Exact placement of gangs with pods of unequal size. Exactness holds because each node takes one
//! pod.

use super::fleet::Fleet;
use super::request::Request;

/// Nodes by the set of groups that they can serve (a bit mask), at one value.
type Classes = Vec<Vec<usize>>;

/// Returns the group and the node position of each pod: the best value, at the lowest level that
/// reaches it, in few domains.
///
/// At a given value each node can serve some of the groups. By Hall's theorem, the gang fits in a
/// domain if and only if, for every set of groups, enough nodes can serve one of them. The number
/// of groups is small.
pub(super) fn solve(fleet: &Fleet, request: &Request) -> Option<Vec<(usize, usize)>> {
    let last = request.within.unwrap_or(fleet.levels.len() - 1);
    let mut best: Option<(u32, usize, usize)> = None;
    for level in 0..=last {
        let mut values: Vec<u32> = request
            .groups
            .iter()
            .flat_map(|group| fleet.view(group.gpus, request.min_link).spreads[level].values.iter().copied())
            .filter(|value| *value > 0)
            .collect();
        values.sort_unstable();
        values.dedup();
        for domain in 0..fleet.domains[level].len() {
            let nodes = fleet.domains[level][domain].clone();
            let is_feasible =
                |value: &u32| is_feasible(request, &classes(fleet, request, level, *value, nodes.clone()));
            // Feasibility is monotonic: what fits at a value fits at every smaller one.
            let reached = values.partition_point(is_feasible);
            let value = reached.checked_sub(1).map(|index| values[index]);
            if let Some(value) = value.filter(|value| best.is_none_or(|(most, ..)| *value > most)) {
                best = Some((value, level, domain));
            }
        }
    }
    let (value, level, domain) = best?;
    Some(assign(request, &minimize_domains(fleet, request, level, domain, value)))
}

fn classes(
    fleet: &Fleet,
    request: &Request,
    level: usize,
    value: u32,
    nodes: impl IntoIterator<Item = usize>,
) -> Classes {
    let needed: Vec<_> = request
        .groups
        .iter()
        .map(|group| {
            let spread = &fleet.view(group.gpus, request.min_link).spreads[level];
            (spread, spread.values.partition_point(|known| *known < value))
        })
        .collect();
    let mut classes = vec![Vec::new(); 1 << request.groups.len()];
    for position in nodes {
        let serves = |(group, (spread, needed)): (usize, &(_, usize))| {
            let spread: &&super::fleet::Spread = spread;
            usize::from(spread.ranks[position] as usize >= *needed) << group
        };
        let class: usize = needed.iter().enumerate().map(serves).sum();
        classes[class].push(position);
    }
    classes[0].clear();
    classes
}

fn is_feasible(request: &Request, classes: &Classes) -> bool {
    (1..classes.len()).all(|groups| {
        let wanted: u64 = request
            .groups
            .iter()
            .enumerate()
            .filter(|(group, _)| groups >> group & 1 == 1)
            .map(|(_, group)| u64::from(group.pods))
            .sum();
        let able: usize =
            (1..classes.len()).filter(|class| class & groups != 0).map(|class| classes[class].len()).sum();
        able as u64 >= wanted
    })
}

/// Drops domains, level by level from the top and emptiest first, while the rest still has room.
fn minimize_domains(fleet: &Fleet, request: &Request, level: usize, domain: usize, value: u32) -> Classes {
    let mut kept: Vec<usize> = fleet.domains[level][domain].clone().collect();
    let able = |nodes: &[usize]| classes(fleet, request, level, value, nodes.iter().copied());
    for below in (0..level).rev() {
        let mut parts: Vec<Vec<usize>> = kept
            .chunk_by(|a, b| fleet.sites[*a].domain[below] == fleet.sites[*b].domain[below])
            .map(<[usize]>::to_vec)
            .collect();
        parts.sort_by_key(|part| able(part).iter().map(Vec::len).sum::<usize>());
        // A domain that is needed now stays needed, because later candidates leave even less.
        let mut index = 0;
        while index < parts.len() {
            let rest = parts.iter().enumerate().filter(|(other, _)| *other != index).flat_map(|(_, part)| part);
            if is_feasible(request, &classes(fleet, request, level, value, rest.copied())) {
                parts.remove(index);
            } else {
                index += 1;
            }
        }
        kept = parts.into_iter().flatten().collect();
        kept.sort_unstable();
    }
    let mut classes = able(&kept);
    for class in &mut classes {
        class.sort_by_key(|position| (fleet.sites[*position].free.count_ones(), *position));
    }
    classes
}

/// Assigns nodes to groups by augmenting paths over classes. This is a maximum flow, which serves
/// every group if Hall's condition holds.
fn assign(request: &Request, classes: &Classes) -> Vec<(usize, usize)> {
    let groups = request.groups.len();
    let mut given = vec![vec![0_u32; groups]; classes.len()];
    let spare = |given: &[Vec<u32>], class: usize| classes[class].len() as u32 - given[class].iter().sum::<u32>();
    for (group, wanted) in request.groups.iter().enumerate() {
        for _ in 0..wanted.pods {
            // Groups that can give up a node, each with the class of that node.
            let mut from: Vec<Option<(usize, usize)>> = vec![None; groups];
            let (mut queue, mut seen) = (vec![group], 1_usize << group);
            while let Some(current) = queue.pop() {
                let able = (1..classes.len()).filter(|class| class >> current & 1 == 1);
                if let Some(class) =
                    able.clone().filter(|class| spare(&given, *class) > 0).min_by_key(|class| class.count_ones())
                {
                    given[class][current] += 1;
                    let mut taker = current;
                    while let Some((class, before)) = from[taker] {
                        given[class][taker] -= 1;
                        given[class][before] += 1;
                        taker = before;
                    }
                    break;
                }
                for class in able {
                    for other in (0..groups).filter(|other| given[class][*other] > 0) {
                        if seen >> other & 1 == 0 {
                            seen |= 1 << other;
                            from[other] = Some((class, current));
                            queue.push(other);
                        }
                    }
                }
            }
        }
    }
    let mut chosen = Vec::new();
    for (class, given) in given.iter().enumerate() {
        let mut nodes = classes[class].iter();
        for (group, count) in given.iter().enumerate() {
            chosen.extend(nodes.by_ref().take(*count as usize).map(|position| (group, *position)));
        }
    }
    chosen
}
