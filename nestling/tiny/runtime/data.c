/* A client's data in flash: little-endian
 *   magic, rows, channels, height, width, kind (low byte 0: float32, 1: uint8; above it how many values a target has: 0: it is a
 *   label, NST_SELF: it is the sample itself), scale, offset, bytes (of all), crc32 (of what follows),
 *   targets (labels of 16 bits a row, padded to 4 bytes; or values, float32; or nothing),
 *   samples (channels, rows, columns; of uint8, x = q * scale + offset).
 */
#include "nestling.h"

typedef struct {
    uint32_t magic, rows, channels, height, width, kind;
    float scale, offset;
    uint32_t bytes, crc;
} blob_header;

NST_ASSERT(blob_header, sizeof(blob_header) == 40);

static uint32_t values_of(const blob_header *h) { return h->kind >> 8; }

static uint64_t target_bytes(const blob_header *h) {
    if (values_of(h) == NST_SELF) return 0;
    return values_of(h) != 0 ? (uint64_t)h->rows * values_of(h) * 4 : ((uint64_t)h->rows * 2 + 3) & ~(uint64_t)3;
}

/* Bytes after the header, or 0 where that is more than 32 bits can say. */
static uint32_t body_bytes(const blob_header *h) {
    uint64_t sample = (uint64_t)h->channels * h->height;
    if (h->rows == 0 || sample == 0 || h->width == 0 || sample > 0xFFFFFFFFu) return 0;
    sample *= h->width;
    if (sample > 0xFFFFFFFFu || h->rows > 0x3FFFFFFFu) return 0;
    uint64_t each = (h->kind & 0xFFu) == 0 ? sample * 4 : sample;
    if (each > 0xFFFFFFFFu / h->rows) return 0;
    uint64_t all = target_bytes(h) + each * h->rows;
    return all > 0xFFFFFFFFu - sizeof(blob_header) ? 0 : (uint32_t)all;
}

int nst_blob_open(nst_blob *blob, const void *data, uint32_t bytes) {
    if (blob == NULL || data == NULL || ((uintptr_t)data & 3u) != 0) return NST_BAD_ARGUMENT;
    blob->rows = 0;
    if (bytes < sizeof(blob_header)) return NST_BAD_LENGTH;
    const blob_header *h = (const blob_header *)data;
    if (h->magic != NST_BLOB_MAGIC) return NST_BAD_MAGIC;
    if ((h->kind & 0xFFu) > 1 || !nst_finite(h->scale) || !nst_finite(h->offset)) return NST_BAD_NUMBER;
    uint32_t body = body_bytes(h);
    /* What lies behind the data does not matter: a board knows where its flash ends, not where the data does. */
    if (body == 0 || h->bytes != body + sizeof(blob_header) || h->bytes > bytes) return NST_BAD_LENGTH;
    const uint8_t *rest = (const uint8_t *)data + sizeof(blob_header);
    if (nst_crc32(0, rest, body) != h->crc) return NST_BAD_CRC;
    blob->rows = h->rows;
    blob->channels = h->channels;
    blob->height = h->height;
    blob->width = h->width;
    blob->kind = h->kind;
    blob->crc = h->crc;
    blob->scale = h->scale;
    blob->offset = h->offset;
    blob->targets = rest;
    blob->samples = rest + target_bytes(h);
    return NST_OK;
}

static int clamped(int value, int most) { return value < 0 ? 0 : value > most ? most : value; }

/* One sample as floats, moved with its border repeated. The blob and the row are already checked. */
int nst_load(float *input, const nst_blob *data, uint32_t row, int down, int right) {
    if (down < -NST_REACH || down > NST_REACH || right < -NST_REACH || right > NST_REACH) return NST_BAD_SHIFT;
    uint32_t size = data->channels * data->height * data->width;
    bool of_bytes = nst_of_bytes(data);
    const float *floats = (const float *)data->samples + (size_t)row * (of_bytes ? 0 : size);
    const uint8_t *bytes = (const uint8_t *)data->samples + (size_t)row * (of_bytes ? size : 0);
    int high = (int)data->height, wide = (int)data->width;
    for (uint32_t line = 0; line < data->channels * data->height; line++) {
        int r = (int)(line % data->height);
        size_t from = (size_t)(line - (uint32_t)r + (uint32_t)clamped(r + down, high - 1)) * data->width;
        for (int c = 0; c < wide; c++) {
            size_t at = from + (size_t)clamped(c + right, wide - 1);
            *input++ = of_bytes ? (float)bytes[at] * data->scale + data->offset : floats[at];
        }
    }
    return NST_OK;
}

/* The values that are a row's target: of a sample that is its own they are those of the data, however its image was moved. */
void nst_load_target(float *target, const nst_blob *data, uint32_t row) {
    uint32_t values = nst_values(data);
    if (values == NST_SELF)
        (void)nst_load(target, data, row, 0, 0);
    else
        nst_copy(target, (const float *)data->targets + (size_t)row * values, values * 4);
}
