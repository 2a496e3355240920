"""A Web Audio API that records what is scheduled, with a clock that tests set."""

FAKE_AUDIO = """
  window.sounds = [];
  window.clock = {now: 10, closed: 0};
  window.AudioContext = class {
    destination = "speaker";
    get currentTime() { return clock.now; }
    close() { clock.closed++; }
  };
  window.PeriodicWave = class {};
  window.DynamicsCompressorNode = class { connect() {} };
  window.GainNode = class {
    constructor(audio, {gain}) {
      this.steps = [[gain]];
      this.gain = {setTargetAtTime: (...step) => this.steps.push(step)};
    }
    connect(to) { this.to = to; }
  };
  window.OscillatorNode = class {
    constructor(audio, {frequency}) { this.sound = {frequency}; sounds.push(this.sound); }
    connect(volume) { this.volume = volume; return volume; }
    start(time) { Object.assign(this.sound, {start: time, steps: this.volume.steps}); }
    stop(time) { this.sound.stop = time; }
  };
"""
