"""Classes of non-negative integers: each small integer has its own class, and large ones share it by their first bits.

With m fine bits, every k below 2^(m+1) has its own class. A larger k is in class (e << m) + (k >> e), with all numbers
of the same length and the same first m + 1 bits; its other e bits are spare. So a class is never wider than 2^-m times
its smallest number.
"""


def class_of(number: int, fine: int) -> int:
    """Return the class of a number.

    Examples
    --------
    >>> [class_of(k, 1) for k in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12)]
    [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7]
    """
    spare = max(0, number.bit_length() - 1 - fine)
    return (spare << fine) + (number >> spare)


def spare_bits(class_: int, fine: int) -> int:
    """Return the number of bits that the class of a number does not determine.

    Examples
    --------
    >>> [spare_bits(c, 1) for c in range(8)]
    [0, 0, 0, 0, 1, 1, 2, 2]
    """
    return max(0, (class_ >> fine) - 1)


def smallest(class_: int, fine: int) -> int:
    """Return the smallest number of a class.

    Examples
    --------
    >>> [smallest(c, 1) for c in range(8)]
    [0, 1, 2, 3, 4, 6, 8, 12]
    """
    spare = spare_bits(class_, fine)
    return class_ - (spare << fine) << spare
