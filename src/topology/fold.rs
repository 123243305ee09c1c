//! Groups uniform blocks of a matrix, which keeps large machines readable.

use switchyard_worker_contract::CpuList;

/// Groups members of `0..count` that have equal relations to all others, in order of each group's
/// first member. Any two members of a group have the same value, and any two groups have one value
/// between them.
pub fn twins<T: PartialEq>(count: usize, value: impl Fn(usize, usize) -> T) -> Vec<Vec<usize>> {
    let is_twin = |a: usize, b: usize| (0..count).all(|c| c == a || c == b || value(a, c) == value(b, c));
    grouped(count, is_twin)
}

/// Groups equal members of `0..count`, in order of each group's first member.
pub fn grouped(count: usize, same: impl Fn(usize, usize) -> bool) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for member in 0..count {
        match groups.iter_mut().find(|group| same(group[0], member)) {
            Some(group) => group.push(member),
            None => groups.push(vec![member]),
        }
    }
    groups
}

/// Puts every member in its own group.
pub fn singletons(count: usize) -> Vec<Vec<usize>> {
    (0..count).map(|member| vec![member]).collect()
}

/// Formats numbers as ranges: `0-3,6`.
pub fn numbers(numbers: impl IntoIterator<Item = u32>) -> String {
    CpuList::new(numbers).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found() {
        let class = |a: usize, b: usize| u8::from(a / 2 == b / 2);
        assert_eq!(twins(6, class), [[0, 1], [2, 3], [4, 5]]);
        assert_eq!(twins(3, |_, _| 1), [[0, 1, 2]]);
        let odd = |a: usize, b: usize| u8::from(a == 1 || b == 1);
        assert_eq!(twins(4, odd), [vec![0, 2, 3], vec![1]]);
        let ring = |a: usize, b: usize| u8::from((a + 1) % 6 == b || (b + 1) % 6 == a);
        assert_eq!(twins(6, ring), singletons(6), "a ring has no two that are the same to all others");
        assert_eq!(numbers([0, 1, 2, 3, 6]), "0-3,6");
    }
}
