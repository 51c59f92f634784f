"""Token files: round trips, the exact bytes of the format, and every fault a reader must refuse."""

import struct
import sys
import unittest

import numpy as np
import xxhash

from folder_test_case import FolderTestCase
from quern.tokens.token_file import HEADER, TokenFileError, TokenWriter, read_token_file


class TokenFileTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "a.tok"

    def write(self, tokens, vocab_size=1000, mask=None, separator=-1, parts=1):
        with TokenWriter(self.path, vocab_size, separator, with_mask=mask is not None) as out:
            for piece in np.array_split(np.arange(len(tokens)), parts):
                out.append(np.array(tokens)[piece], None if mask is None else np.array(mask)[piece])
        return self.path.read_bytes()

    def refused(self, data, expected):
        self.path.write_bytes(data)
        with self.assertRaises(TokenFileError) as caught:
            read_token_file(self.path)
        self.assertIn(expected, str(caught.exception))
        self.assertIn(str(self.path), str(caught.exception))

    def patched(self, data, offset, format, value):
        data = bytearray(data)
        struct.pack_into("<" + format, data, offset, value)
        return self.signed(data)

    def signed(self, data):
        struct.pack_into("<Q", data, 32, xxhash.xxh3_64_intdigest(bytes(data[64:])))
        return bytes(data)

    def test_what_is_written_is_read_whatever_the_length_width_mask_and_pieces(self):
        random = np.random.default_rng(0)
        for count in (1, 3, 4, 5, 8, 63, 64, 65, 1001):
            for vocab_size in (1, 65536, 65537, 200000):
                for parts in (1, 7):
                    tokens = random.integers(0, vocab_size, count)
                    mask = random.integers(0, 2, count).astype(bool)
                    for loss_mask in (None, mask):
                        with self.subTest(count=count, vocab_size=vocab_size, parts=parts, mask=loss_mask is not None):
                            self.write(tokens, vocab_size, loss_mask, separator=vocab_size - 1, parts=parts)
                            got = read_token_file(self.path)
                            np.testing.assert_array_equal(got.tokens, tokens)
                            self.assertEqual((got.vocab_size, got.separator_token), (vocab_size, vocab_size - 1))
                            if loss_mask is None:
                                self.assertIsNone(got.loss_mask)
                            else:
                                np.testing.assert_array_equal(got.loss_mask, mask)

    def test_the_bytes_are_those_of_the_documented_layout(self):
        data = self.write([1, 2, 258], vocab_size=300, mask=[True, False, True], separator=2)
        payload = bytes([1, 0, 2, 0, 2, 1, 0, 0]) + bytes([0b101, 0, 0, 0, 0, 0, 0, 0])
        header = b"QUERNTOK" + struct.pack("<IIQII", 1, 1, 3, 300, 2)
        header += struct.pack("<Qi", xxhash.xxh3_64_intdigest(payload), 2) + bytes(20)
        self.assertEqual(data, header + payload)

    def test_vocabularies_over_65536_take_four_bytes(self):
        self.assertEqual(len(self.write([65535], 65536)), 64 + 8)
        self.assertEqual(len(self.write([65536, 0, 1], 65537)), 64 + 16)

    def test_files_that_are_not_whole_are_refused(self):
        data = self.write(range(100), mask=[True] * 100)
        self.refused(b"", "0 bytes")
        self.refused(data[:63], "63 bytes")
        for size in (64, len(data) - 8, len(data) - 1):
            self.refused(data[:size], f"{size} bytes, expected {len(data)}")
        self.refused(data + b"\0", "bytes, expected")

    def test_wrong_header_fields_are_refused(self):
        data = self.write(range(100))
        self.refused(b"NOTTOKEN" + data[8:], "not a token file")
        self.refused(self.patched(data, 8, "I", 2), "version 2")
        self.refused(self.patched(data, 12, "I", 2), "flags 0x2")
        self.refused(self.patched(data, 12, "I", 1), "bytes, expected")  # a mask that is not there
        self.refused(self.patched(data, 16, "Q", 0), "0 tokens")
        self.refused(self.patched(data, 16, "Q", 101), "bytes, expected")
        self.refused(self.patched(data, 16, "Q", 2**64 - 1), "bytes, expected")
        self.refused(self.patched(data, 24, "I", 0), "vocabulary size 0")
        self.refused(self.patched(data, 28, "I", 3), "3 bytes a token")
        self.refused(self.patched(data, 40, "i", 1000), "separator token 1000")
        self.refused(self.patched(data, 40, "i", -2), "separator token -2")
        self.refused(self.patched(data, 60, "I", 1), "reserved bytes")

    def test_damage_anywhere_in_the_payload_is_noticed(self):
        data = self.write(range(101), mask=[True] * 101)
        for at in (64, 150, len(data) - 1):
            damaged = bytearray(data)
            damaged[at] ^= 0x10
            self.refused(bytes(damaged), "checksum")

    def test_tokens_outside_the_vocabulary_are_refused_with_their_position(self):
        data = self.write([5, 6, 7, 8])
        self.refused(self.patched(data, 64 + 2 * 2, "H", 1000), "token 2 is 1000, expected less than 1000")

    def test_padding_is_zero(self):
        data = self.write([5, 6, 7], mask=[True] * 3)
        self.refused(self.patched(data, 64 + 6, "H", 1), "padding")
        self.refused(self.patched(data, 64 + 8, "B", 0b1111), "padding")

    def test_the_writer_refuses_what_a_reader_would(self):
        for tokens in ([-1], [1000], [0.5], [[1]]):
            with self.assertRaises(ValueError):
                self.write(tokens)
        with self.assertRaisesRegex(ValueError, "no tokens"):
            self.write([])
        with self.assertRaisesRegex(ValueError, "separator"):
            self.write([1], separator=1000)
        with self.assertRaisesRegex(ValueError, "mask of shape"):
            with TokenWriter(self.path, 10, with_mask=True) as out:
                out.append([1, 2], [True])
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self):
        old = self.write([1, 2, 3])
        with self.assertRaises(RuntimeError), TokenWriter(self.path, 10) as out:
            out.append([1])
            raise RuntimeError
        self.assertEqual(self.path.read_bytes(), old)
        self.assertEqual(list(self.folder.iterdir()), [self.path])

    def test_the_header_is_64_bytes(self):
        self.assertEqual(HEADER.size, 64)


if __name__ == "__main__":
    unittest.main()
