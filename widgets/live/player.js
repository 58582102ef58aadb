// A cursor over a recording: follows the head, or stands, or plays beat by beat.
//
// Knows recordings. Must not know the page or its buttons: time comes in as a number.

/** Where a view stands. `current` is the {state, scene} to draw. */
export class Player {
  constructor(recording, paced) {
    this.recording = recording;
    this.paced = paced; // a log that comes faster than the eye is played, not jumped through
    this.mode = "live"; // live | paused | playing
    this.beatsPerSecond = 0; // 0: as fast as shows a race in about 10 s
    this.cursor = recording.end;
    this.model = null;
    this.nextBeatAt = 0;
    this.version = recording.version;
  }
  get current() {
    return this.mode === "live" ? this.recording.head : this.model;
  }
  get position() {
    return this.mode === "live" ? this.recording.end : this.cursor;
  }
  seek(seq, mode = "paused") {
    const { base, end } = this.recording;
    const target = Math.max(base, Math.min(end, seq));
    if (this.mode !== "live" && this.model && target >= this.cursor) {
      while (this.cursor < target) this.model.fold(this.recording.event(this.cursor++));
    } else {
      this.model = this.recording.modelAt(target);
      this.cursor = target;
    }
    this.mode = mode;
  }
  goLive() {
    this.mode = "live";
    this.model = null;
  }
  forward(mode = "paused") {
    let seq = this.position + 1;
    while (seq < this.recording.end && !this.recording.isBeat(seq)) seq++;
    this.seek(seq, mode);
  }
  back() {
    let seq = this.position - 1;
    while (seq > this.recording.base && !this.recording.isBeat(seq)) seq--;
    this.seek(seq);
  }
  play(nowMs) {
    if (this.position >= this.recording.end) this.seek(this.raceStart(), "playing");
    else this.seek(this.position, "playing");
    this.nextBeatAt = nowMs;
  }
  /** Where the race of the head began: the beat of its first arrival. */
  raceStart() {
    const { base, end, head } = this.recording;
    let seq = Math.max(base, Math.min(end, ...head.scene.lanes.map((lane) => lane.arrivalSeq)));
    while (seq > base && !this.recording.isBeat(seq)) seq--;
    return seq;
  }
  /** Events came in. A paced log starts to play from where the view stood. */
  onEvents(before, nowMs) {
    if (this.version !== this.recording.version) {
      this.version = this.recording.version;
      this.goLive();
      before = this.recording.base;
    }
    if (this.paced && this.mode === "live" && this.recording.head.scene.lanes.length) {
      this.seek(Math.max(before, this.recording.base), "playing");
      this.nextBeatAt = nowMs;
    }
  }
  beatMs() {
    if (this.beatsPerSecond) return 1000 / this.beatsPerSecond;
    const ends = this.recording.raceEnds.get(this.model ? this.model.scene.race : 0);
    const beats = 2 * Math.max(1, ends ? ends.step : 1);
    return Math.max(40, Math.min(900, 10000 / beats));
  }
  /** Play on as far as time says. Returns whether it still moves. */
  tick(nowMs) {
    if (this.mode !== "playing") return false;
    while (this.mode === "playing" && nowMs >= this.nextBeatAt && this.cursor < this.recording.end) {
      this.forward("playing");
      this.nextBeatAt = Math.max(this.nextBeatAt + this.beatMs(), nowMs - 200);
    }
    if (this.cursor >= this.recording.end) this.goLive();
    return this.mode === "playing";
  }
}
