// Pictures of the next message: chosen, pasted or dropped.

import { $ } from "./chat_answer.js";
import { pictureRow } from "./chat_view.js";

let pictures = []; // data URLs

export function showPictures(urls) {
  pictures = urls;
  $("shown").replaceChildren(pictureRow(urls, (index) => showPictures(urls.filter((_, each) => each !== index))));
  $("shown").hidden = !urls.length;
}

export function takePictures() {
  const taken = pictures;
  showPictures([]);
  return taken;
}

function read(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

async function add(files) {
  const found = [...files].filter(({ type }) => type.startsWith("image/"));
  const urls = await Promise.all(found.map(read));
  showPictures([...pictures, ...urls]);
  $("prompt").focus();
}

const hasFiles = ({ dataTransfer }) => [...(dataTransfer?.types ?? [])].includes("Files");

export function listenForPictures() {
  $("picture").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { add($("file").files).then(() => { $("file").value = ""; }); });
  $("prompt").addEventListener("paste", (event) => {
    const files = event.clipboardData?.files ?? [];
    if (![...files].some(({ type }) => type.startsWith("image/"))) return;
    event.preventDefault();
    add(files);
  });
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("dropping");
    add(event.dataTransfer.files);
  });
}
