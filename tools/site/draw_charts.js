for (const place of document.querySelectorAll("div.chart > script")) {
  vegaEmbed(place.parentElement, JSON.parse(place.text), JSON.parse(place.dataset.options));
}
