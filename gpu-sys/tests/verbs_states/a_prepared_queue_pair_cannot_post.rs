use gpu_sys::verbs::{Post, PreparedQueuePair};

fn post(mut prepared: PreparedQueuePair<()>, batch: &mut Vec<Post<()>>) {
    let _taken = prepared.post(batch);
}

fn main() {}
