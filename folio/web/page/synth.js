// A small synthesizer: plays notes with the Web Audio API, one piece at a time, only after a click on its button.

const MAX_GAIN = 0.15; // of the loudest note; full scale is 1
const ATTACK = 0.01, RELEASE = 0.05; // time constants in seconds
const HARMONICS = [0, 1, 0.45, 0.3, 0.15, 0.08]; // amplitudes of the voice, like an organ's
const AHEAD = 2; // seconds in which notes begin that are scheduled; a page in the background wakes up once per second
const SCHEDULE_INTERVAL = 500; // milliseconds

let player = null; // current playback: {audio, view, key, time(), show, timer}

// A button that plays and stops a piece. key: identifies the piece; a new button of the same key takes over.
// piece(): {notes, seconds}, or a promise: notes {start, end, pitch, velocity} in units of this many seconds.
// show(time): called in each frame with the time in units, and without it at the end.
function playButton(key, piece, show = () => {}) {
  const node = button("Play", async () => {
    if (player?.key === key) stopPlaying();
    else startPlaying(key, await piece(), update);
  }, {testid: "play"});
  if (player?.key === key) player.show = update;
  update(player?.key === key ? player.time() : undefined);
  return node;

  function update(time) {
    node.textContent = time === undefined ? "Play" : "Stop";
    node.classList.toggle("chosen", time !== undefined);
    show(time);
  }
}

// Play until the end, or until another view is shown.
function startPlaying(key, {notes, seconds}, show) {
  stopPlaying();
  const audio = new AudioContext(), startTime = audio.currentTime + 0.1, {view} = state;
  const output = new DynamicsCompressorNode(audio), length = Math.max(0, ...notes.map(({end}) => end));
  const voice = new PeriodicWave(audio, {real: HARMONICS.map(() => 0), imag: HARMONICS});
  const queue = notes.filter(({start, end}) => end > start).sort((a, b) => a.start - b.start);
  output.connect(audio.destination);
  player = {audio, key, show, time: () => Math.max(0, (audio.currentTime - startTime) / seconds)};
  schedule();
  player.timer = setInterval(schedule, SCHEDULE_INTERVAL);
  follow();

  function schedule() {
    if (state.view !== view) return stopPlaying();
    while (queue.length && startTime + queue[0].start * seconds < audio.currentTime + AHEAD) {
      const {start, end, pitch, velocity} = queue.shift();
      sound(pitch, velocity, startTime + start * seconds, startTime + end * seconds);
    }
  }

  function sound(pitch, velocity, begin, end) {
    const tone = new OscillatorNode(audio, {frequency: 440 * 2 ** ((pitch - 69) / 12), periodicWave: voice});
    const volume = new GainNode(audio, {gain: 0}), {gain} = volume;
    tone.connect(volume).connect(output);
    gain.setTargetAtTime(MAX_GAIN * velocity / 127, begin, ATTACK);
    gain.setTargetAtTime(0, end, RELEASE);
    tone.start(begin);
    tone.stop(end + 8 * RELEASE);
  }

  function follow() {
    if (player?.audio !== audio) return;
    if (state.view !== view || player.time() > length + 8 * RELEASE / seconds) return stopPlaying();
    player.show(player.time());
    requestAnimationFrame(follow);
  }
}

function stopPlaying() {
  if (!player) return;
  const {audio, timer, show} = player;
  player = null;
  clearInterval(timer);
  audio.close();
  show();
}
